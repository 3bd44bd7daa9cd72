"""Records the gradients of a training job and characterizes their sparsity."""
