"""The solver: gradients and schemes as numbers, and the search for the buckets and schemes of the shortest step."""
