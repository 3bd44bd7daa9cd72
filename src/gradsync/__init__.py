"""gradsync: the cheapest way to synchronise every gradient tensor of a distributed PyTorch training job."""

import lazy_loader as _lazy

__version__ = "0.1.0"

# What a name is comes from the stub beside this file; torch is imported with the first of them.
__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
