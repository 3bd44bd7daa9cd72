"""Measurements that plans are made by: the job, links, kernels; and the planners that measure."""
