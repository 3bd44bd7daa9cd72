"""Examines an installation and its machine: versions, devices, backends, kernels, addresses, and two ranks."""
