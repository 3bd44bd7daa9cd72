"""Planners: turn measurements of a job into plans; each module is imported with the first name that it defines."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
