"""Measurements that plans are made by, of steps, links and kernels; and the planners that measure."""
