"""Compressors: a tensor of one rank -> a payload -> a tensor that is near the first one. They know nothing of ranks."""

from .base import Compressor as Compressor
from .base import State as State
from .feedback import ErrorFeedback as ErrorFeedback
from .sparsify import TopK as TopK
