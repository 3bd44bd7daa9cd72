"""The fixed-size hash tables of hierarchical hashing, and its result (Zen, OSDI 2025, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsync.kernels.checks import INT32_INDICES, check_owners


@dataclass(frozen=True)
class HashedIndices:
    """The result of `hierarchical_hash`: the indices of each owner (rank that sums them), and those without a place."""

    owned: list[Tensor]  # (count,) for each owner, in the dtype of the indices, in any order
    overflow: Tensor  # the indices of all owners that found no place, 1-D, in any order
    num_serial: int  # how many indices found no slot by any rehash, the overflow among them
    nbytes: int  # size of the memory


@dataclass(frozen=True)
class HashMemory:
    """The size of the hash table in which `hierarchical_hash` collects the indices of one owner (rank that sums them).

    Attributes:
        slots: the places that are filled in parallel, each by an index that hashes to it.
        serial: the places for indices that find no free slot.
    """

    slots: int
    serial: int

    @classmethod
    def split(cls, n: int, *, slots: int, serial: int, rehashes: int) -> HashMemory:
        """Returns the size of one of n owners' hash tables; `slots` and `serial` are those of all owners together.

        Raises:
            ValueError: for no slot, rehashes outside [1, 64], a negative serial part, or 2^31 slots or more an owner.
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
