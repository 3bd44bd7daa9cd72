"""Frontends: the code between autograd and the engine, as `attach`, the class in DDP's place, and DDP's hook."""
