"""Planners, and the searches that make plans from measurements; modules are imported with the first name of theirs."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
