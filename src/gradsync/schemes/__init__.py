"""Schemes: how one bucket becomes the synchronised one. Each runs (`synchronize`) and tells what it does (`steps`)."""

from .base import Partitioned as Partitioned
from .base import Scheme as Scheme
from .base import State as State
from .base import from_expression as from_expression
from .base import register as register
from .base import registered as registered
from .base import to_expression as to_expression
from .capacity import RowCapacity as RowCapacity
from .centralized import AGSparse as AGSparse
from .dense import AllReduce as AllReduce
from .elements import BalancedElements as BalancedElements
from .partitioned import BalancedParallelism as BalancedParallelism
