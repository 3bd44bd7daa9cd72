"""The benchmark harness: training methods are timed in turns on one cluster, and their measurements become records."""
