"""A cache of the lists of indices that each owner has by hash, needed to decode hash bitmaps (Zen, OSDI 2025).

Every rank decodes the bitmaps of all owners, so it keeps all lists: an integer for each element of the tensor, as much
memory as a gradient in float32. The paper's figure for extra memory leaves the lists out.

Lists live as long as a group object. Each bucket has one (`engine/bucket_run.py`), so that lists stay from step to
step, are shared by buckets of equal length, and are freed with the last of these buckets, when the plan is replaced or
the engine closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..devices import streams

_Key = tuple[int, int, int, str]  # length, owners, seed, device


@dataclass(frozen=True, eq=False)
class _Lists:
    """The lists of indices of all owners, as an object to which weak references are possible, unlike a tuple."""

    of_owners: tuple[Tensor, ...]


_made: WeakValueDictionary[_Key, _Lists] = WeakValueDictionary()
_kept: WeakKeyDictionary[Group, dict[_Key, _Lists]] = WeakKeyDictionary()
_asked_by_one = Lock()  # ranks may be threads


def owned_by_hash(
    length: int, owners: int, seed: int, device: torch.device, *, kept_for: Group | None = None
) -> tuple[Tensor, ...]:
    """Returns for each of `owners` ranks the indices in [0, length) that a hash assigns to it, ascending.

    The lists are cached, and dropped when the process group `kept_for` is; see `kernels.owned_by_hash` for shapes and
    dtypes.
    """
    key = (length, owners, seed, str(device))
    with _asked_by_one:
        lists = _made.get(key)
        if lists is None:
            lists = _Lists(tuple(kernels.owned_by_hash(length, owners, seed, device=device)))
            streams.settle(device)
            _made[key] = lists
        if kept_for is not None:
            _kept.setdefault(kept_for, {})[key] = lists
    return lists.of_owners


def forget() -> None:
    """Empties the cache of `owned_by_hash`, for all process groups."""
    with _asked_by_one:
        _kept.clear()
