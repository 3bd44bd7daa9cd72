"""Benchmarks, an emulated cluster, workloads, and other systems' schemes and planners to compare gradsync with."""
