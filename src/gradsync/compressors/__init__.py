"""Compressors: a tensor of one rank -> a payload -> a tensor that is near the first one. They know nothing of ranks."""

from .base import Compressor as Compressor
from .base import Message as Message
from .base import Payload as Payload
from .base import SparseMessage as SparseMessage
from .base import Sparsifier as Sparsifier
from .base import State as State
from .base import Summand as Summand
from .feedback import ErrorFeedback as ErrorFeedback
from .law import Absolute as Absolute
from .law import Biased as Biased
from .law import Contraction as Contraction
from .law import Exact as Exact
from .law import Law as Law
from .law import Unbiased as Unbiased
from .momentum import MomentumCorrection as MomentumCorrection
from .momentum import dgc as dgc
from .sparsify import BlockTopK as BlockTopK
from .sparsify import TopK as TopK
from .threshold import GaussianK as GaussianK
from .threshold import Threshold as Threshold
from .warmup import Warmup as Warmup
