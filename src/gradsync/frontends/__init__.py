"""Frontends connect autograd and optimisers with the engine: `attach`, a class in DDP's place, and DDP's hook."""
