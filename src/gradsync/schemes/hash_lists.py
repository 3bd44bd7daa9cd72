"""Which indices an owner has by hash: the lists that hash bitmaps are read with (Zen, OSDI 2025).

Every rank reads the bitmaps of all owners, so it keeps all lists: an integer for each element of the tensor, as much
memory as a gradient in float32. The paper's figure for extra memory leaves them out.

A bucket has a group object of its own (`engine/bucket_run.py`), for which its lists are kept: they are there from step
to step, are shared by buckets of a length, and go with the last of the buckets, when its plan is replaced or its engine
closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group

_Key = tuple[int, int, int, str]  # length, owners, seed, device


@dataclass(frozen=True, eq=False)
class _Lists:
    """What a tuple is not: it can be referred to weakly."""

    of_owners: tuple[Tensor, ...]


_made: WeakValueDictionary[_Key, _Lists] = WeakValueDictionary()
_kept: WeakKeyDictionary[Group, dict[_Key, _Lists]] = WeakKeyDictionary()
_asked_by_one = Lock()  # ranks may be threads


def owned_by_hash(
    length: int, owners: int, seed: int, device: torch.device, *, kept_for: Group | None = None
) -> tuple[Tensor, ...]:
    """The ascending indices of each owner, made unless they are kept already; kept as long as `kept_for` exists.

    See `kernels.owned_by_hash`.
    """
    key = (length, owners, seed, str(device))
    with _asked_by_one:
        lists = _made.get(key)
        if lists is None:
            lists = _Lists(tuple(kernels.owned_by_hash(length, owners, seed, device=device)))
            _made[key] = lists
        if kept_for is not None:
            _kept.setdefault(kept_for, {})[key] = lists
    return lists.of_owners


def forget() -> None:
    """Frees all lists that are kept."""
    with _asked_by_one:
        _kept.clear()
