"""Benchmarks, an emulated cluster, workloads, and the systems of others that gradsync is measured beside."""
