"""Which indices an owner has by hash: the lists that hash bitmaps are read with (Zen, OSDI 2025).

Every rank reads the bitmaps of all owners, so it keeps all lists: an integer for each element of the tensor, as much
memory as a gradient in float32. The paper's figure for extra memory leaves them out.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from .. import kernels
from ..sparse import index_dtype

MOST_BYTES = 4 << 30  # of all lists that are kept; those asked for last are kept whatever they take

_Key = tuple[int, int, int, str]  # length, owners, seed, device
_kept: dict[_Key, tuple[Tensor, ...]] = {}  # the ones asked for last come last
_asked_by_one = Lock()  # ranks may be threads


def lists_nbytes(length: int) -> int:
    """What the lists of a tensor take on each rank, however many owners there are."""
    return length * index_dtype(length).itemsize


def owned_by_hash(length: int, owners: int, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """The ascending indices of each owner, made once for a length, number of owners and seed, as long as there is room.

    See `kernels.owned_by_hash`.
    """
    key = (length, owners, seed, str(device))
    with _asked_by_one:
        lists = _kept.pop(key, None)
        if lists is None:
            lists = tuple(kernels.owned_by_hash(length, owners, seed, device=device))
        _kept[key] = lists
        while len(_kept) > 1 and kept_nbytes() > MOST_BYTES:
            del _kept[next(iter(_kept))]
    return lists


def forget() -> None:
    """Frees all lists that are kept."""
    with _asked_by_one:
        _kept.clear()


def kept_nbytes() -> int:
    """What all lists take that are kept at present."""
    return sum(each.numel() * each.element_size() for lists in _kept.values() for each in lists)
