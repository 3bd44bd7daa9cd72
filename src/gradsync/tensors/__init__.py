"""Gradients as tensors: buckets, the views that parameters get, rows and elements, densities, marks of writes."""
