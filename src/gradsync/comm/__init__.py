"""Collectives over `torch.distributed`: groups of ranks, a ledger of sent bytes, and the order of issuing."""

from .backends import torch_group as torch_group
from .communicators import backend_for as backend_for
from .distributed import TorchGroup as TorchGroup
from .errors import GroupError as GroupError
from .framing import LENGTH_BYTES as LENGTH_BYTES
from .framing import split as split
from .gloo import GlooGroup as GlooGroup
from .group import Group as Group
from .group import Pending as Pending
from .group import gather_bytes as gather_bytes
from .group import waiting_at as waiting_at
from .issue import Synchronization as Synchronization
from .issue import drive as drive
from .issue import drive_in_turns as drive_in_turns
from .local import LocalGroup as LocalGroup
from .local import run_local as run_local
from .messages import broadcast_tensors as broadcast_tensors
from .messages import dense_parts as dense_parts
from .record import Ledger as Ledger
from .record import RecordingGroup as RecordingGroup
from .stream_group import StreamGroup as StreamGroup
from .survivors import Survival as Survival
from .survivors import Survivors as Survivors
from .threads import JobThread as JobThread
from .work import Work as Work
from .work import WorkGivenUpError as WorkGivenUpError
