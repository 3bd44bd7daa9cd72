"""Schemes: algorithms that turn one bucket into its sum over all ranks (`synchronize`), with their cost (`steps`)."""

import lazy_loader as _lazy

# Each module is imported with the first of its names; all are imported where a plan's name is looked up.
__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
