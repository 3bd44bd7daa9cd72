"""Measures training steps, links and kernels, and has the planners that plan from these measurements."""
