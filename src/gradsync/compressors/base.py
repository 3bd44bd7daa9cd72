"""The protocol of compressors: their settings and traits, the state from step to step, and the payloads they make."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.index_formats import ALIGNMENT_BYTES
from ..tensors.sparse import SparseVector
from .expressions import Nameable
from .law import Law

# Errors at both compress points are in units of the sum over ranks.
SENT = "sent"
"""The compress point of a rank's own gradient: the key of its state in a scheme's `State`."""
SUMS = "sums"
"""The compress point of the sums that an owner sends back: the key of their state in a scheme's `State`."""


def sums_point(number: int, copies: int = 1) -> str:
    """Returns the key of a scheme's state for compressing sums over ranks: "sums", "sums 2" or "sums 2 of 4".

    Args:
        number: counts the scheme's compressions of sums, from 1; the first one's key has no number.
        copies: how many ranks hold, and compress, the same sums; above 1, "of 4" is added.
    """
    name = SUMS if number == 1 else f"{SUMS} {number}"
    return name if copies == 1 else f"{name} of {copies}"


def copies_at(point: str) -> int:
    """Returns how many ranks compress the same sums, from the key of a state: 4 for "sums 2 of 4", 1 for "sums 2".

    It is 0 for a key of something else than sums, such as "sent", a rank's own gradient.
    """
    form = re.fullmatch(rf"{SUMS}(?: \d+)?(?: of (?P<copies>\d+))?", point)
    return 0 if form is None else int(form["copies"] or 1)


@dataclass(frozen=True)
class CompressorState:
    """A compressor's state for one flat tensor, such as a residual. It is not overwritten, so steps can be undone.

    Attributes:
        spec: the layout of the tensor: its dtype, and the names and shapes of the parameters, or slices of them, in it
            (segments).
        stream: a number, usually the rank, by which ranks draw different random numbers.
        step: how often the tensor was compressed before.
        elements: tensors of shape (numel,), by name; if a new plan cuts the flat tensor elsewhere, they are cut like
            it.
        tensors: one tensor of any shape for each segment, by name; dropped for segments that a new plan cuts.
        together: tensors for all segments together, by name; they change even if ranks use only some parameters.
        agreed: the maxima over the ranks of what `Compressor.observe` returned in this step, (num_agreed,) float32.
    """

    spec: FlatSpec
    stream: int = 0
    step: int = 0
    elements: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    together: Mapping[str, Tensor] = field(default_factory=dict)
    agreed: Tensor | None = None

    @property
    def arrived(self) -> list[tuple[int, int]] | None:
        """The ranges [start, stop) of elements that the ranks exchanged in the last step; None: all were.

        Elements outside of these ranges were sent by no rank, and their sum is 0. Only schemes that choose ranges for
        all ranks alike, such as `CoarseGrained`, have them.
        """
        return None

    def unused(self, names: Collection[str]) -> CompressorState:
        """Returns the state to keep after a step in which no rank used the parameters `names`; by default this one.

        A subclass may change `together`. The caller itself sets `elements` and `tensors` of these parameters back to
        their values before the step.
        """
        return self

    def next(self, **changes: Any) -> Self:
        """Returns the state after one more step, with `changes` to its fields."""
        return replace(self, step=self.step + 1, agreed=None, **changes)

    def sections(self, seed: int, *, shared: bool = False) -> kernels.Sections:
        """Returns the segments of the flat tensor (one per parameter or slice), each with a random seed for this step.

        Seeds are the same on all ranks if `shared`, else they depend on the number `stream`, usually the rank. A seed
        depends on the name of its parameter, not on the other parameters of the bucket.
        """
        own = -1 if shared else self.stream
        seeds = _mixed(_keys(self.spec, seed, own), self.step, self.spec.salt)
        return replace(self.spec.sections, seeds=tuple(seeds.tolist()))


@lru_cache(maxsize=256)
def _keys(spec: FlatSpec, seed: int, stream: int) -> np.ndarray:
    """Returns a hash of each segment's name, `seed` and `stream` (the rank, as a rule): (segments,) uint64."""
    names = [hashlib.blake2b(segment.name.encode(), digest_size=8).digest() for segment in spec.segments]
    keys = np.array([int.from_bytes(name, "little") for name in names], dtype=np.uint64)
    return _mixed(_mixed(np.zeros_like(keys), keys), seed, stream)


def _mixed(mixed: np.ndarray, *numbers: int | np.ndarray) -> np.ndarray:
    """Returns 64 bits that depend on `mixed` and all the numbers: splitmix64 (Steele et al., 2014) over each number."""
    for number in numbers:
        wrapped = np.uint64(number & (1 << 64) - 1) if isinstance(number, int) else number
        mixed = mixed + wrapped + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ mixed >> np.uint64(31)
    return mixed


@dataclass(frozen=True)
class Payload:
    """A compressed tensor. Only `data` is sent: all ranks know the other attributes already.

    Attributes:
        maker: the compressor, which also decodes it.
        spec: names, shapes and dtype of the compressed tensors.
        step: how often the maker had compressed the tensor before.
        data: the encoded tensor; a subclass says its shape and dtype.
    """

    maker: Compressor[Any]
    spec: FlatSpec
    step: int
    data: Tensor

    @property
    def nbytes(self) -> int:
        """The size of `data` in bytes."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class Message(Payload):
    """A compressed tensor as (nbytes,) uint8 that cannot be summed: each receiver decodes the message of each rank."""


@dataclass(frozen=True)
class SparseMessage(Message):
    """A compressed tensor with some elements of the tensor, so that schemes for sparse elements can sum it."""


@dataclass(frozen=True)
class Summand(Payload):
    """A compressed tensor of numbers that an all-reduce can sum, so that the sum of the tensors is decoded.

    The sum decodes to the sum of the ranks' decoded tensors; that of count sketches, to an estimate of it.

    Attributes:
        agreed: numbers that decoding needs, such as scales: maxima over the ranks, (num_agreed,) float32, the same on
            all; None if it needs none.
    """

    agreed: Tensor | None = None


P = TypeVar("P", bound=Payload)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class CompressorTraits:
    """Properties of a compressor that schemes and planners read before it runs.

    A compressor that wraps another one has the inner traits, or derives its own from them:
    `replace(inner.traits, made_for_ranks=4)`.

    Attributes:
        payload: the class of the compressed tensors, which decides which schemes can send them.
        agrees: whether ranks compute the maxima of some numbers before they compress, see `Compressor.observe`.
        feeds_back: whether error feedback can make up for what the compressor leaves out. It cannot if the sum of
            payloads does not decode to the sum of the ranks' decoded tensors.
        most_summands: how many payloads can be added before the numbers overflow; None: any number.
        made_for_ranks: how many ranks compress together, if the settings say so; None: any number.
        waits_for_device: on an accelerator the host reads numbers of payloads, such as their lengths, to decode them.
        follows_scale: whether a multiple of a tensor decodes to the same multiple. It does not if signs alone are sent,
            or a setting is in units of the gradient; such a compressor is refused under a loss scale.
    """

    payload: type[Payload] = Message
    agrees: bool = False
    feeds_back: bool = True
    most_summands: int | None = None
    made_for_ranks: int | None = None
    waits_for_device: bool = False
    follows_scale: bool = True


USUAL_TRAITS, SPARSE_TRAITS = CompressorTraits(), CompressorTraits(SparseMessage)


class Compressor(Nameable, ABC, Generic[P]):
    """A compressor turns a flat tensor of one rank into a payload (encoded tensor), and a payload into a tensor again.

    A compressor is a frozen dataclass of settings. A subclass defines `law` (the error bound), `compress`, `decompress`
    and `nbytes`, and its `traits` if they are not the usual ones. State is passed in, and the next state is returned: a
    compressor keeps nothing, and overwrites none of its arguments. It does not communicate: a scheme sends and sums the
    payloads.
    """

    kind: ClassVar[str] = "compressor"

    @property
    def traits(self) -> CompressorTraits:
        """Properties that schemes and planners read before the compressor runs, such as the class of its payloads."""
        return USUAL_TRAITS

    @property
    def title(self) -> str:
        """The compressor's short name in printed tables of results, without its settings."""
        return self.name

    def kernel(self, what: str) -> str:
        """Returns the name by which a cost model lists what an operation of this compressor takes.

        `what` is the operation, such as "compress", for which the name is "compress_TopK(ratio=...)".
        """
        return f"{what}_{self}"

    @abstractmethod
    def law(self, spec: FlatSpec) -> Law:
        """Returns the bound that the compressor promises for its error on tensors of the shapes and dtype in `spec`."""

    @abstractmethod
    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        """Returns the bytes of a tensor like `spec` when it is compressed, which all ranks know in advance.

        Args:
            spec: shapes and dtype of the tensor.
            step: how often the tensor was compressed before.
        """

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        """Returns the largest number of non-zero elements that a tensor can have after it was compressed and decoded.

        Args:
            spec: shapes and dtype of the tensor.
            step: how often the tensor was compressed before.
        """
        return spec.numel

    def unchanged_since(self, step: int) -> int:
        """Returns the first step from which on `nbytes` and `num_kept` are the same as at `step`."""
        return 0

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        """Returns the dtype of the numbers that ranks sum if a tensor like `spec` is compressed to a `Summand`."""
        return spec.dtype

    @property
    def of_sums(self) -> Compressor[Any]:
        """The compressor for sums over ranks that a rank sends on, unless a scheme names another one.

        It is this compressor, but without operations that each rank applied to its own gradient before the sum, such as
        momentum.
        """
        return self

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        """Returns the state before the first step, with tensors on the CPU.

        `stream` is a number, usually the rank, by which ranks draw different random numbers.

        Raises:
            TypeError: for tensors that are not floating point.
        """
        check_floating(spec)
        return CompressorState(spec, stream)

    def num_agreed(self, spec: FlatSpec) -> int:
        """Returns how many numbers `observe` returns for a tensor like `spec` (shapes and dtype); 0 if none."""
        return 0

    def observe(self, x: Tensor, state: CompressorState) -> Tensor | None:
        """Returns this rank's numbers whose maxima over the ranks are needed to compress; None if there are none.

        Args:
            x: the flat tensor that is compressed next, (numel,) in the dtype of `state.spec`.
            state: the state before this step.

        Returns:
            (num_agreed(spec),) float32, such as the largest magnitude of each block. A scheme computes their maxima
            over the ranks, number by number, and hands them to `compress` as `state.agreed`.
        """
        return None

    @abstractmethod
    def compress(self, x: Tensor, state: CompressorState) -> tuple[P, CompressorState]:
        """Returns `x` compressed (the payload), and the state after this step; `x` is (numel,) as `state.spec` says.

        Raises:
            ValueError: if the state is of another tensor.
        """

    @torch.no_grad()
    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[P, Tensor, CompressorState]:
        """Compresses x + residual, as error feedback does.

        Args:
            x: (numel,) in the dtype of `state.spec`.
            residual: (numel,) float32, or float64 for float64.
            state: the state before this step.

        Returns:
            The payload, the next residual (what the payload leaves out; shape and dtype of `residual`), and the next
            state.
        """
        corrected = corrected_by(residual, x)
        payload, next_state = self.compress(narrowed(corrected, x.dtype), state)
        return payload, self.remainder(corrected, payload), next_state

    @abstractmethod
    def decompress(self, payload: P) -> Tensor:
        """Returns the decoded tensor, with the shape (numel,), dtype and device of the compressed one.

        Raises:
            ValueError: for a payload of another compressor, or a damaged one where the damage shows.
        """

    def sum_into(self, out: Tensor, payloads: Sequence[P], scale: float = 1.0) -> None:
        """Overwrites `out`, (numel,) floating, by `scale` times the sum of the decoded payloads, added in their order.

        The sum is made in float32 (float64 for float64), and rounded once to the dtype of `out`.

        Raises:
            ValueError: for a payload of another compressor, a damaged one where the damage shows, or if `out` has
                another number of elements.
        """
        total = memory.zeros(out.numel(), kernels.accumulation_dtype(out.dtype), out.device)
        for payload in payloads:
            check_size(payload, out)
            total += self.decompress(payload)
        out.copy_(total.mul_(scale))

    def remainder(self, x: Tensor, payload: P) -> Tensor:
        """Subtracts the decoded `payload` (a compressed tensor) from `x` in place, and returns `x`.

        `x`: (numel,) of the dtype that was compressed, or a wider one.
        """
        sent = memory.empty_like(x)
        self.sum_into(sent, [payload])
        return x.sub_(sent)


class Sparsifier(Compressor[SparseMessage]):
    """A compressor that sends some elements of a tensor and nothing of the others."""

    @property
    def traits(self) -> CompressorTraits:
        return SPARSE_TRAITS

    @abstractmethod
    def elements(self, payload: SparseMessage) -> SparseVector:
        """Returns the elements in the payload: ascending indices, and values in the dtype of the compressed tensor.

        Raises:
            ValueError: for a payload of another compressor, or a damaged one where the damage shows.
        """

    def decompress(self, payload: SparseMessage) -> Tensor:
        return self.elements(payload).to_dense()

    def sum_into(self, out: Tensor, payloads: Sequence[SparseMessage], scale: float = 1.0) -> None:
        for payload in payloads:
            check_size(payload, out)
        parts = [self.elements(payload).checked() for payload in payloads]  # before anything is overwritten
        wide = kernels.accumulation_dtype(out.dtype)
        total = (out if out.dtype is wide else memory.empty_like(out, wide)).zero_()
        for part in parts:
            part.add_to(total)
        if scale != 1:
            total.mul_(scale)
        if total is not out:
            out.copy_(total)

    def remainder(self, x: Tensor, payload: SparseMessage) -> Tensor:
        return self.elements(payload).subtract_from(x)


def corrected_by(residual: Tensor, x: Tensor) -> Tensor:
    """Returns x + residual, both (numel,), in the dtype of the residual (what compression left out before)."""
    return torch.add(residual, x, out=memory.empty_like(residual))


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x`, of any shape, in `dtype`, which is not wider. Finite numbers stay finite, unlike with `x.to`."""
    if x.dtype is dtype:
        return x
    out = memory.empty_like(x, dtype)
    if dtype.itemsize == 2:
        kernels.narrow(x, out)
    else:
        out.copy_(x)
    return out


def check_floating(spec: FlatSpec) -> None:
    """Checks that a tensor is floating point.

    Raises:
        TypeError: if it is not.
    """
    if not spec.dtype.is_floating_point:
        raise TypeError(f"compressors take floating-point tensors, got {spec.dtype}: use a scheme without a compressor")


def check_tensor(x: Tensor, state: CompressorState) -> None:
    """Checks that `x` is a flat tensor with the number of elements and the dtype that the state was made for.

    Raises:
        ValueError: if it is not.
    """
    if x.dim() != 1 or x.numel() != state.spec.numel or x.dtype is not state.spec.dtype:
        raise ValueError(
            f"the state is of a flat {state.spec.dtype} tensor of {state.spec.numel} elements, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )


def check_payload(maker: Compressor[Any], payload: Payload, out: Tensor | None = None) -> None:
    """Checks a payload before it is decoded, perhaps into `out`, (numel,).

    Raises:
        ValueError: for a payload of another compressor, of another length than its compressor makes, or of a tensor
            with another number of elements than `out`.
    """
    if payload.maker != maker:
        raise ValueError(f"expected a payload of {maker}, got one of {payload.maker}")
    if payload.nbytes != maker.nbytes(payload.spec, payload.step):
        raise ValueError(
            f"a payload of {payload.spec.numel} elements by {maker} has {maker.nbytes(payload.spec, payload.step)} "
            f"bytes, got {payload.nbytes}"
        )
    if out is not None:
        check_size(payload, out)


def check_size(payload: Payload, out: Tensor) -> None:
    """Checks that a payload (compressed tensor) decodes to as many elements as `out`, (numel,), has.

    Raises:
        ValueError: if it does not.
    """
    if out.numel() != payload.spec.numel:
        raise ValueError(f"a payload of {payload.spec.numel} elements cannot be summed into {out.numel()}")


def by_spec(method: Callable[[Any, FlatSpec], T]) -> Callable[[Any, FlatSpec], T]:
    """Decorates a method of a compressor and a tensor's layout (`FlatSpec`) so that its results are cached.

    The results may depend only on these two: the compressor's settings, and the shapes and dtype in the layout.
    """
    return lru_cache(maxsize=256)(method)


def alike(keys: Iterable[K]) -> dict[K, list[int]]:
    """Returns the indices at which each key occurs, such as those of all tensors of one shape, which can be stacked."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def stacked(parts: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """Returns the tensors parts[place] for each of `places`, 1-D and of one length, as rows: (places, length)."""
    return torch.stack([parts[place] for place in places]) if len(places) > 1 else parts[places[0]][None]


def unstack(rows: Tensor, parts: Sequence[Tensor], places: Sequence[int]) -> None:
    """Overwrites the tensors parts[place] for each of `places`, (length,), by the rows of `rows`, (places, length)."""
    torch._foreach_copy_([parts[place] for place in places], list(rows.unbind()))


Field = tuple[torch.dtype, int]
"""One part of a message: the dtype and the number of its elements."""


def fields_nbytes(*layout: Field) -> int:
    """Returns the bytes of a message made of these fields, each given as (dtype, number of elements).

    Each field but the last is padded to a multiple of 8 bytes.
    """
    if not layout:
        return 0
    *first, (dtype, count) = layout
    return sum(_padded(dtype.itemsize * count) for dtype, count in first) + dtype.itemsize * count


def fields(message: Tensor, *layout: Field) -> list[Tensor]:
    """Returns the fields of a message, (nbytes,) uint8, as 1-D views of its memory.

    `layout` lists (dtype, number of elements) of each field, in their order in the message.
    """
    views, offset = [], 0
    for dtype, count in layout:
        nbytes = dtype.itemsize * count
        views.append(message[offset : offset + nbytes].view(dtype))
        offset += _padded(nbytes)
    return views


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
