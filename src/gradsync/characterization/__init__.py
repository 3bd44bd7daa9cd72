"""A job's gradients recorded, and figures of them."""
