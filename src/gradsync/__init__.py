"""gradsync: gradient synchronisation for distributed PyTorch training, the right scheme for each gradient."""

__version__ = "0.1.0"
