"""Compressors: a tensor of one rank -> a payload -> a tensor that is near the first one. They know nothing of ranks."""

from .base import Compressor as Compressor
from .base import Message as Message
from .base import Payload as Payload
from .base import SparseMessage as SparseMessage
from .base import Sparsifier as Sparsifier
from .base import State as State
from .base import Summand as Summand
from .cast import Cast as Cast
from .feedback import ErrorFeedback as ErrorFeedback
from .law import Absolute as Absolute
from .law import Biased as Biased
from .law import Contraction as Contraction
from .law import Exact as Exact
from .law import Law as Law
from .law import Unbiased as Unbiased
from .quantize import QSGD as QSGD
from .quantize import BlockInt as BlockInt
from .quantize import Float8 as Float8
from .quantize import Natural as Natural
from .quantize import SharedBlockInt as SharedBlockInt
from .quantize import SharedTernGrad as SharedTernGrad
from .quantize import TernGrad as TernGrad
from .sparsify import TopK as TopK
