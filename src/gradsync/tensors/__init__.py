"""Gradients as tensors: buckets, `param.grad` as views of them, rows and elements, densities, detection of writes."""
