"""The benchmark harness: methods take turns on one cluster in one run, and their measurements become records."""
