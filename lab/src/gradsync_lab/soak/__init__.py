"""A soak: hours of training under torchrun while faults come at random, compared with a run without faults."""
