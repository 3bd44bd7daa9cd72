"""Compressors: a tensor of one rank -> a payload -> a tensor that is near the first one. They know nothing of ranks."""

from ..expressions import register as register
from .base import Compressor as Compressor
from .base import Message as Message
from .base import Payload as Payload
from .base import SparseMessage as SparseMessage
from .base import Sparsifier as Sparsifier
from .base import State as State
from .base import Summand as Summand
from .base import check_floating as check_floating
from .base import check_payload as check_payload
from .base import check_tensor as check_tensor
from .base import fields as fields
from .base import fields_nbytes as fields_nbytes
from .feedback import ErrorFeedback as ErrorFeedback
from .law import Absolute as Absolute
from .law import Biased as Biased
from .law import Contraction as Contraction
from .law import Exact as Exact
from .law import Law as Law
from .law import Unbiased as Unbiased
from .sign import OneBit as OneBit
from .sign import ScaledSign as ScaledSign
from .sign import Sign as Sign
from .sign import Signum as Signum
from .sparsify import TopK as TopK
