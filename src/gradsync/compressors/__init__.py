"""Compressors: lossy encodings of one tensor on one rank. A scheme sends the payloads and sums them over the ranks."""

import lazy_loader as _lazy

# Each module is imported with the first of its names; all are imported where a plan's name is looked up.
__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
