"""Zen as its paper describes it (Wang et al., OSDI 2025): hierarchical hashing, push of pairs, pull with hash bitmaps.

gradsync's own scheme for the same task is in `gradsync.schemes.elements`. The authors' released code is another
algorithm, which can lose gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsync import kernels
from gradsync.comm import LENGTH_BYTES, Group
from gradsync.compressors.expressions import register
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Compute, Step, Transfer
from gradsync.inputs.settings import NonNegativeInt
from gradsync.kernels.hierarchy import HashMemory
from gradsync.schemes.base import Scheme, State, Traits
from gradsync.schemes.elements import counts_in, elements_of, nonzeros
from gradsync.schemes.formats import PartFormat
from gradsync.schemes.hash_lists import owned_by_hash
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile
from gradsync.tensors.index_formats import IndexFormat
from gradsync.tensors.sparse import index_dtype

REHASHES = 3  # k of the paper
SLOTS = 2  # slots of the parallel memory for each expected non-zero: R1 of the paper
SERIAL_SHARE = 0.1  # serial memory over parallel memory: R2 of the paper
FEWEST_SLOTS = 64  # per owner: small numbers of elements vary by more than SLOTS allows for
HEAD_BYTES = LENGTH_BYTES + 16  # a message's length, its number of elements, and of indices without a place

Pairs = tuple[Tensor, Tensor]  # indices (count,) in any order, values (count, 1)


@register
@dataclass(frozen=True)
class ZenHash(Scheme[Tensor]):
    """Zen's Balanced Parallelism by hierarchical hashing, for the non-zero elements of a flat bucket. Exact.

    A Murmur hash decides owners. A rank hashes its indices into memory of a fixed size (`hierarchical_hash`), and
    pushes the contents of each owner's memory as pairs of index and value, in the order of the slots. Owners sum, and
    send to all ranks the sums and a bitmap over the elements that they may own.

    Beyond the paper: slots are taken by compare-and-swap; indices that find no place, as when the density jumps, are
    pushed in a second round of messages, so that nothing is lost; sums are in rank order, whatever the slots. NaN and
    infinity count as non-zeros; -0.0 is zero and comes out as 0.0.

    Wire per rank: push (n-1)/n * (indices + values); pull (n-1)/n * (a bit for every element + values of the
    union). Memory beside that: slots of all owners, and lists of all elements, 4 bytes each (8 beyond 2^31), which are
    kept from step to step.
    """

    seed: int = 0  # for all hashes; the same on every rank
    expected: NonNegativeInt = 0  # non-zeros that a rank's memory has room for; 0: as many as the rank has in a step

    traits = Traits(Layout.FLAT)

    def planned_for(self, profiles: Sequence[DensityProfile]) -> ZenHash:
        """Returns the scheme with hash memory for `profiles[0].rows` non-zeros, or without profiles for each step's."""
        return replace(self, expected=math.ceil(profiles[0].rows) if profiles else 0)

    def stages(self, size: int) -> tuple[str, ...]:
        return ("push", "pull")

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        owned = owned_by_hash(x.numel(), group.size, self.seed, x.device, kept_for=group)
        hashed = self._hash(nonzeros(x)[0], group.size)
        # Push: send each owner the contents of its memory, and then the indices without a place.
        memory, everyone = self._memory(0, group.size), range(group.size)
        most = min(memory.slots + memory.serial, x.numel()) if self.expected else x.numel()
        pairs, left = await _push(hashed.owned, len(hashed.overflow), x, everyone, most, group)
        if any(left):
            late = [rank for rank in everyone if left[rank]]
            rest = _by_owner(hashed.overflow, group.size, self.seed)
            pushed, _ = await _push(rest, 0, x, late, max(left), group)
            pairs = [_joined(first, second) for first, second in zip(pairs, pushed, strict=True)]
        # Pull: receive each owner's sums, and a bitmap over the elements that it owns.
        forms = [PartFormat(len(indices), 1, x.dtype, (IndexFormat.BITMAP,)) for indices in owned]
        message = _sum(pairs, owned[group.rank], forms[group.rank], x.numel(), scale)
        messages = await _swap([message] * group.size, everyone, max(f.most_nbytes for f in forms), group)
        return _join(messages, forms, owned, x), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the computations and transfers of one `synchronize`, in order, for cost models to predict its time.

        The profile counts a rank's non-zero elements as rows; without one, all are non-zero. `step` is not used.
        """
        (flat,) = specs
        n = placement.size
        profile = elements_of(flat, profiles)
        memory, index_nbytes = self._memory(profile.rows, n), index_dtype(flat.numel).itemsize
        left = expected_overflow(profile.rows / n, memory)
        pairs, bits = _pairs_format(flat), PartFormat(-(-flat.numel // n), 1, flat.dtype, (IndexFormat.BITMAP,))
        push, pull = pairs.nbytes(profile.rows / n - left), bits.nbytes(profile.union_rows(n) / n)
        found = profile.rows * (index_nbytes + flat.itemsize)
        slots_nbytes = n * (memory.slots + memory.serial) * index_nbytes
        repeat = [_all_to_all("repeat", n, pairs.nbytes(left))] if n * left >= 1 else []
        return (
            Compute("find_elements", flat.nbytes + 2 * found),
            Compute("hierarchical_hash", 3 * slots_nbytes),  # cleared, filled, read
            Compute("pack_pairs", 2 * found, calls=n),
            _all_to_all("push", n, push),
            *repeat,
            Compute("sum_pairs", n * pairs.nbytes(profile.rows / n) + pull),
            _all_to_all("pull", n, pull),
            Compute("join_hashed", n * pull + profile.union_rows(n) * index_nbytes + flat.nbytes, calls=n),
        )

    def _memory(self, rows: float, size: int) -> HashMemory:
        """Returns the sizes of the hash memory that a rank has for the indices of one owner."""
        slots = max(SLOTS * math.ceil(self.expected or rows), FEWEST_SLOTS * size)
        return HashMemory.split(size, slots=slots, serial=math.ceil(SERIAL_SHARE * slots), rehashes=REHASHES)

    def _hash(self, indices: Tensor, size: int) -> kernels.HashedIndices:
        memory = self._memory(len(indices), size)
        return kernels.hierarchical_hash(
            indices,
            size,
            slots=size * memory.slots,
            serial=size * memory.serial,
            rehashes=REHASHES,
            seed=self.seed,
        )


def expected_overflow(rows: float, memory: HashMemory) -> float:
    """Returns how many of an owner's `rows` indices are expected to find no place in its hash memory.

    It is assumed that all indices without a slot try one at the same time, `REHASHES` times; the rest fill `serial`.
    """
    left, free = rows, float(memory.slots)
    for _ in range(REHASHES):
        placed = min(free * -math.expm1(-left / memory.slots), left)
        left, free = left - placed, free - placed
    return max(left - memory.serial, 0.0)


def _by_owner(indices: Tensor, size: int, seed: int) -> list[Tensor]:
    owners = torch.empty_like(indices)
    kernels.owners_by_hash(indices, size, seed, owners)
    return [indices[owners == owner] for owner in range(size)]


def _pairs_format(flat: TensorSpec) -> PartFormat:
    return PartFormat(flat.numel, 1, flat.dtype, (IndexFormat.LIST,))


async def _push(
    parts: Sequence[Tensor], left: int, x: Tensor, senders: Sequence[int], most: int, group: Group
) -> tuple[list[Pairs], list[int]]:
    """Sends (index, value) pairs to owners; returns each sender's pairs for this rank and number of unplaced indices.

    Unplaced indices found no place in the sender's hash memory. Ranks that are not in `senders` have no pairs.

    Args:
        most: the most pairs of any message, the same on all ranks.
    """
    form = _pairs_format(TensorSpec.of(x))
    outgoing = []
    for indices in parts:
        message = _message(len(indices), left, form, x)
        pairs = form.part(message[HEAD_BYTES:], len(indices))
        pairs.positions.encode(indices)
        torch.index_select(x.view(-1, 1), 0, indices, out=pairs.values)
        outgoing.append(message)
    arrived = await _swap(outgoing, senders, int(form.nbytes(most)), group)
    nothing = (parts[0][:0], x.new_empty(0, 1))
    received, lefts = [nothing] * group.size, [0] * group.size
    for sender, (count, lefts[sender], body) in arrived.items():
        pairs = form.part(body, count)
        received[sender] = (pairs.positions.decode(), pairs.values)
    return received, lefts


def _message(count: int, left: int, form: PartFormat, like: Tensor) -> Tensor:
    """Returns a message with room for `count` elements, and with `count` and `left` written, but not its length."""
    message = like.new_empty(HEAD_BYTES + int(form.nbytes(count)), dtype=torch.uint8)
    message[LENGTH_BYTES:HEAD_BYTES].copy_(torch.tensor([count, left]).view(torch.uint8))
    return message


async def _swap(
    messages: Sequence[Tensor], senders: Sequence[int], most_nbytes: int, group: Group
) -> dict[int, tuple[int, int, Tensor]]:
    """Sends message i to rank i; returns, by sender, (number of elements, of indices without hash memory, the body)."""
    mine = messages[group.rank]
    outgoing = dict(enumerate(messages)) if group.rank in senders else {}
    outgoing.pop(group.rank, None)
    origins = [rank for rank in senders if rank != group.rank]
    arrived = await group.swap(outgoing, origins, HEAD_BYTES + most_nbytes, mine.device)
    everything = {rank: mine if rank == group.rank else arrived[rank] for rank in senders}
    said = zip(everything.items(), counts_in(list(everything.values()), HEAD_BYTES), strict=True)
    return {rank: (count, left, message[HEAD_BYTES:]) for (rank, message), (count, left) in said}


def _joined(first: Pairs, second: Pairs) -> Pairs:
    return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])


def _sum(pairs: Sequence[Pairs], owned: Tensor, form: PartFormat, numel: int, scale: float) -> Tensor:
    """Returns `scale` times the sum of all ranks' pairs, in rank order, as a message."""
    union = kernels.unite_rows([indices for indices, _ in pairs], numel)
    message = _message(union.count, 0, form, pairs[0][1])
    total = form.part(message[HEAD_BYTES:], union.count)
    indices = owned.new_empty(union.count, dtype=index_dtype(numel))
    union.write_indices(indices)
    union.sum([values for _, values in pairs], [total.values], scale=scale)
    positions = total.positions.room()
    kernels.positions_in(owned, indices, positions)
    total.positions.encode(positions)
    return message


def _join(
    messages: dict[int, tuple[int, int, Tensor]], forms: Sequence[PartFormat], owned: Sequence[Tensor], x: Tensor
) -> Tensor:
    """Overwrites the flat bucket `x` with the owners' sums, and with zero where there are none, and returns `x`."""
    x.zero_()
    for owner, (count, _, body) in messages.items():
        total = forms[owner].part(body, count)
        indices = owned[owner].index_select(0, total.positions.decode())
        kernels.scatter_rows(indices, total.values, x.view(-1, 1), accumulate=False)
    return x


def _all_to_all(stage: str, size: int, nbytes: float) -> Transfer:
    """Returns the transfer in which every rank sends every other a message: a header and `nbytes`."""
    ranks = range(size)
    return Transfer.of_messages(
        stage, size, [(r, other, HEAD_BYTES + nbytes) for r in ranks for other in ranks if other != r]
    )
