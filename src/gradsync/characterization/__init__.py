"""Records which gradients of a training job are non-zero, and computes figures of their sparsity."""
