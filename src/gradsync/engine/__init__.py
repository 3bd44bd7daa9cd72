"""The engine of one model runs a plan (buckets of gradients and a scheme for each) and picks the fastest of several."""
