"""The compressor protocol: what a compressor is, what it remembers, and what travels."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.sparse import SparseVector
from .expressions import Nameable
from .law import Law

ALIGNMENT_BYTES = 8  # where the fields of a message begin
SENT, SUMS = "sent", "sums"  # where schemes compress: what a rank sends, and an owner's sums; both in units of a sum


def sums_point(number: int, copies: int = 1) -> str:
    """Where a scheme compresses sums for the `number`-th time, from 1; so many ranks compress, and keep, the same."""
    name = SUMS if number == 1 else f"{SUMS} {number}"
    return name if copies == 1 else f"{name} of {copies}"


def copies_at(point: str) -> int:
    """How many ranks keep the same at a point where sums are compressed; 0 for other points."""
    form = re.fullmatch(rf"{SUMS}(?: \d+)?(?: of (?P<copies>\d+))?", point)
    return 0 if form is None else int(form["copies"] or 1)


@dataclass(frozen=True)
class CompressorState:
    """What a compressor knows and remembers of one flat tensor. Nothing in it is overwritten: a step can be taken back.

    `elements` goes with the elements of the tensor wherever a plan cuts it, `tensors` with each segment as a whole,
    `together` with all of them: it goes on whichever of them were used.
    """

    spec: FlatSpec
    stream: int = 0  # tells apart those who compress at the same time: what they draw, each for itself, differs by it
    step: int = 0  # how often it was compressed before
    elements: Mapping[str, Tensor] = field(default_factory=dict)  # each (numel,)
    tensors: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)  # each one tensor for every segment
    together: Mapping[str, Tensor] = field(default_factory=dict)
    agreed: Tensor | None = None  # what the ranks agreed on for this step, see `Compressor.observe`

    def next(self, **changes: Any) -> CompressorState:
        """The state after one more step."""
        return replace(self, step=self.step + 1, agreed=None, **changes)

    def sections(self, seed: int, *, shared: bool = False) -> kernels.Sections:
        """The segments with their seeds of this step, `shared` by all streams or this one's own.

        They depend on the names of the tensors, not on which other ones lie beside them.
        """
        own = -1 if shared else self.stream
        seeds = _mixed(_keys(self.spec, seed, own), self.step, self.spec.salt)
        return replace(self.spec.sections, seeds=tuple(seeds.tolist()))


@lru_cache(maxsize=256)
def _keys(spec: FlatSpec, seed: int, stream: int) -> np.ndarray:
    """What the seeds of all steps begin with, (segments,) uint64."""
    names = [hashlib.blake2b(segment.name.encode(), digest_size=8).digest() for segment in spec.segments]
    keys = np.array([int.from_bytes(name, "little") for name in names], dtype=np.uint64)
    return _mixed(_mixed(np.zeros_like(keys), keys), seed, stream)


def _mixed(mixed: np.ndarray, *numbers: int | np.ndarray) -> np.ndarray:
    """64 bits that depend on those before and on all the numbers: splitmix64 (Steele et al., 2014) over each."""
    for number in numbers:
        wrapped = np.uint64(number & (1 << 64) - 1) if isinstance(number, int) else number
        mixed = mixed + wrapped + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ mixed >> np.uint64(31)
    return mixed


@dataclass(frozen=True)
class Payload:
    """What travels of a tensor, with what all ranks know without being told."""

    maker: Compressor[Any]
    spec: FlatSpec  # of what was compressed
    step: int
    data: Tensor  # what travels

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class Message(Payload):
    """Bytes, (nbytes,) uint8, which nobody can sum: each receiver decodes what each rank sent."""


@dataclass(frozen=True)
class SparseMessage(Message):
    """A message of few elements, which schemes for sparse tensors can sum."""


@dataclass(frozen=True)
class Summand(Payload):
    """Numbers whose sum over ranks decodes to the sum of what each decodes to, or of sketches to an estimate of it.

    An all-reduce takes them.
    """

    agreed: Tensor | None = None


P = TypeVar("P", bound=Payload)
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Compressor(Nameable, ABC, Generic[P]):
    """How a flat tensor of one rank becomes a payload, and a payload a tensor again.

    A frozen dataclass of settings. State is passed in and the next state comes back: nothing is kept here, and nothing
    passed in is overwritten. It knows no ranks: a scheme sums what they sent, in the way that its payload allows.
    """

    kind: ClassVar[str] = "compressor"
    payload: ClassVar[type[Payload]] = Message  # decides which schemes may carry it; of some, their settings decide

    @property
    def title(self) -> str:
        """What tells it from other compressors in a table."""
        return self.name

    def kernel(self, what: str) -> str:
        """What cost models call such work of it: other settings are another kernel, with costs of its own."""
        return f"{what}_{self}"

    @property
    def agrees(self) -> bool:
        """Whether the ranks agree on something before they compress: see `observe`."""
        return False

    def num_agreed(self, spec: FlatSpec) -> int:
        """How many numbers `observe` gives for a tensor of `spec`."""
        return 0

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        """How many elements at most are not zero in what comes back of a tensor of `spec`."""
        return spec.numel

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        """The type of a `Summand`'s numbers."""
        return spec.dtype

    @property
    def most_summands(self) -> int | None:
        """How many of its `Summand`s can be summed before numbers overflow; None: any number."""
        return None

    @property
    def made_for_ranks(self) -> int | None:
        """How many ranks compress together, if its settings say so; None: any number."""
        return None

    @abstractmethod
    def law(self, spec: FlatSpec) -> Law:
        """What it promises of its error on any tensor of `spec`."""

    def init(self, spec: FlatSpec, stream: int = 0) -> CompressorState:
        """The state before the first step.

        Raises:
            TypeError: for tensors that are not floating point.
        """
        check_floating(spec)
        return CompressorState(spec, stream)

    @property
    def of_sums(self) -> Compressor[Any]:
        """What an owner compresses the sums of payloads by, where nothing else is said.

        It does not do twice what a rank does to its own gradient, as momentum.
        """
        return self

    @property
    def feeds_back(self) -> bool:
        """Whether error feedback makes good what it leaves out: a sum of payloads decodes to what each decodes to."""
        return True

    def observe(self, x: Tensor, state: CompressorState) -> Tensor | None:
        """What the ranks agree on before they compress, if `agrees`: their largest, one by one, becomes `agreed`.

        (num_agreed(spec),) float32.
        """
        return None

    @abstractmethod
    def compress(self, x: Tensor, state: CompressorState) -> tuple[P, CompressorState]:
        """The payload of `x`, (numel,), and the next state.

        Raises:
            ValueError: for another tensor than the state is of.
        """

    @torch.no_grad()
    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[P, Tensor, CompressorState]:
        """The payload of x + residual, what it leaves of that (new, in the residual's type), and the next state."""
        corrected = corrected_by(residual, x)
        payload, next_state = self.compress(narrowed(corrected, x.dtype), state)
        return payload, self.remainder(corrected, payload), next_state

    @abstractmethod
    def decompress(self, payload: P) -> Tensor:
        """A tensor like the one that was compressed, (numel,).

        Raises:
            ValueError: for a payload of another compressor, or one that is damaged where that can be told.
        """

    def sum_into(self, out: Tensor, payloads: Sequence[P], scale: float = 1.0) -> None:
        """Overwrites `out`, (numel,) floating, by `scale` times the sum of what the payloads decode to, in their order.

        The sum is made in float32 (float64 for float64), and rounded once.
        """
        total = memory.zeros(out.numel(), kernels.accumulation_dtype(out.dtype), out.device)
        for payload in payloads:
            check_size(payload, out)
            total += self.decompress(payload)
        out.copy_(total.mul_(scale))

    @abstractmethod
    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        """The size of what `compress` makes of a tensor of `spec` at that step."""

    def unchanged_since(self, step: int) -> int:
        """From which step on `nbytes` and `num_kept` are what they are at this one."""
        return 0

    def remainder(self, x: Tensor, payload: P) -> Tensor:
        """What the payload, as it is summed, leaves of `x`, whose dtype may be a wider one; overwrites `x`."""
        sent = memory.empty_like(x)
        self.sum_into(sent, [payload])
        return x.sub_(sent)


class Sparsifier(Compressor[SparseMessage]):
    """A compressor that sends some elements as they are and nothing of the others."""

    payload = SparseMessage

    @abstractmethod
    def elements(self, payload: SparseMessage) -> SparseVector:
        """The elements that travel.

        Raises:
            ValueError: as `decompress`.
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
    """residual + x, in the residual's type."""
    return torch.add(residual, x, out=memory.empty_like(residual))


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In a type as narrow or narrower: what is finite stays finite, so that a residual takes up the rest."""
    if x.dtype is dtype:
        return x
    out = memory.empty_like(x, dtype)
    if dtype.itemsize == 2:
        kernels.narrow(x, out)
    else:
        out.copy_(x)
    return out


def check_floating(spec: FlatSpec) -> None:
    """
    Raises:
        TypeError: for tensors that are not floating point.
    """
    if not spec.dtype.is_floating_point:
        raise TypeError(f"compressors take floating-point tensors, got {spec.dtype}")


def check_tensor(x: Tensor, state: CompressorState) -> None:
    """
    Raises:
        ValueError: for another tensor than the state is of.
    """
    if x.dim() != 1 or x.numel() != state.spec.numel or x.dtype is not state.spec.dtype:
        raise ValueError(
            f"the state is of a flat {state.spec.dtype} tensor of {state.spec.numel} elements, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )


def check_payload(maker: Compressor[Any], payload: Payload, out: Tensor | None = None) -> None:
    """
    Raises:
        ValueError: for a payload of another compressor, of another length than its compressor makes, or of another
            tensor than `out`, which is to be overwritten by it.
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
    """
    Raises:
        ValueError: for a payload of another tensor than `out`, which is to be overwritten by it.
    """
    if out.numel() != payload.spec.numel:
        raise ValueError(f"a payload of {payload.spec.numel} elements cannot be summed into {out.numel()}")


def by_spec(method: Callable[[Any, FlatSpec], T]) -> Callable[[Any, FlatSpec], T]:
    """For methods of settings and a spec alone that are asked several times a step: worked out once for each."""
    return lru_cache(maxsize=256)(method)


def alike(keys: Iterable[K]) -> dict[K, list[int]]:
    """The places of equal keys: what is done to each of many small tensors is done to equal ones at once."""
    places: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def stacked(parts: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """Those parts of one length, (places, length)."""
    return torch.stack([parts[place] for place in places]) if len(places) > 1 else parts[places[0]][None]


def unstack(rows: Tensor, parts: Sequence[Tensor], places: Sequence[int]) -> None:
    """Overwrites those parts by rows."""
    torch._foreach_copy_([parts[place] for place in places], list(rows.unbind()))


Field = tuple[torch.dtype, int]  # of a message: type and number of elements


def fields_nbytes(*layout: Field) -> int:
    """The size of a message of these fields; all but the last are padded."""
    if not layout:
        return 0
    *first, (dtype, count) = layout
    return sum(_padded(dtype.itemsize * count) for dtype, count in first) + dtype.itemsize * count


def fields(message: Tensor, *layout: Field) -> list[Tensor]:
    """Views of the fields of a message, (nbytes,) uint8, one after the other."""
    views, offset = [], 0
    for dtype, count in layout:
        nbytes = dtype.itemsize * count
        views.append(message[offset : offset + nbytes].view(dtype))
        offset += _padded(nbytes)
    return views


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
