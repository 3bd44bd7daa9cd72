"""The memory of hierarchical hashing, of a fixed size, and its result (Zen, OSDI 2025, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsync.kernels.checks import INT32_INDICES, check_owners


@dataclass(frozen=True)
class HashedIndices:
    """Indices by owner, as they came to lie in the memory of the owners."""

    owned: list[Tensor]  # per owner, in any order
    overflow: Tensor  # that found no place, of all owners, in any order
    num_serial: int  # that no rehash had a slot for; the overflow is part of them
    nbytes: int  # of the memory


@dataclass(frozen=True)
class HashMemory:
    """The memory of one owner: a parallel part of `slots` and a serial part."""

    slots: int
    serial: int

    @classmethod
    def split(cls, n: int, *, slots: int, serial: int, rehashes: int) -> HashMemory:
        """An owner's share of memory for all n.

        Raises:
            ValueError: no slot, none or too many rehashes, a negative serial part, more than 2^31 - 1 slots an owner.
        """
        check_owners(n)
        if slots < 1 or serial < 0:
            raise ValueError(f"slots must be at least 1 and serial not negative, got {slots} and {serial}")
        if not 1 <= rehashes <= 64:
            raise ValueError(f"rehashes must be in [1, 64], got {rehashes}")
        memory = cls(-(-slots // n), -(-serial // n))
        if memory.slots + memory.serial >= INT32_INDICES:
            raise ValueError(
                f"an owner's memory must be below 2^31 slots, got {memory.slots + memory.serial}: split it"
            )
        return memory
