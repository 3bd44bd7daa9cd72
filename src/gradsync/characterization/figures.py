"""Figures of sparsity for every tensor of a model: how sparse gradients are, and how much ranks overlap.

`statistics.py` computes the figures from footprints (indices of non-zero elements), of gradients given here, exchanged
between the ranks of a process group, or recorded earlier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import AfterValidator

from ..comm import Group, gather_bytes, torch_group
from ..inputs.files import from_json, read_as
from ..tensors.density import MOST_FOUND, DensityProfile
from .footprint import Footprint, Footprints, Gradient, Shape, footprints_from_bytes, footprints_to_bytes
from .statistics import Frozen, Sparsity, elements_of, full_sparsity, mean_over_steps, rows_of, sparsity_of

TIMEOUT_S = 600.0

Gradients = Mapping[str, Gradient]
"""The gradients of one rank in one training step, by parameter name."""


def _equal_to_one(version: int) -> int:
    if version != 1:
        raise ValueError(f"expected a characterization of version 1, got version {version}")
    return version


class TensorCharacterization(Frozen):
    """The sparsity figures of one parameter's gradient: of its elements and, with two dimensions or more, of its rows.

    Attributes:
        shape: the shape of the gradient.
        sparse: whether some rank's gradient had the sparse layout.
        full: whether a quick look found few zeros; the figures are then those of a tensor without zeros, not measured.
        elements, rows: densities, overlap between ranks and skewness.
        filled_ratio: the share of non-zero elements within rows that are not all zero; None where there are none.
        pattern: a digest of the non-zero rows: equal for tensors that have the same ones on every rank.
    """

    shape: tuple[int, ...]
    sparse: bool
    full: bool
    elements: Sparsity
    rows: Sparsity | None = None
    filled_ratio: float | None = None
    pattern: str = ""

    def view(self) -> Sparsity:
        """Returns the sparsity figures of rows if at least half of the rows are all zero, else those of elements."""
        return self.rows if self.rows is not None and self.rows.density.mean <= MOST_FOUND else self.elements


class Characterization(Frozen):
    """The result of `characterize`: sparsity figures of each parameter's gradient, and of all sparse ones together.

    Attributes:
        version: the version of the file format, 1.
        ranks: the number of ranks.
        steps: the number of training steps.
        sampled: whether some figures are estimates: only a sample of rows was read, or a quick look found a full
            tensor.
        tensors: the figures of each parameter's gradient, by name.
        together: the figures of the elements of all gradients of which at most half is non-zero, whatever their layout,
            concatenated in the order of `tensors`; None without such gradients.
    """

    version: Annotated[int, AfterValidator(_equal_to_one)] = 1
    ranks: int
    steps: int
    sampled: bool
    tensors: dict[str, TensorCharacterization]
    together: Sparsity | None = None

    def to_json(self) -> str:
        """Returns all figures as JSON, which `from_json` reads."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str) -> Characterization:
        """Returns the characterization that `to_json` wrote as this text.

        Raises:
            ValueError: for text that is not JSON, or fields that do not fit.
        """
        return read_as(cls.model_validate_json, from_json(text, "characterization"), "characterization")

    def profile(self, name: str) -> DensityProfile:
        """Returns the measured density of one tensor, from which schemes predict how many bytes they send.

        The density is of rows if at least half of the rows are all zero, of elements otherwise.

        Raises:
            ValueError: if no tensor of this name was characterized.
        """
        if name not in self.tensors:
            raise ValueError(f"no tensor {name!r} was characterized; there are {', '.join(map(repr, self.tensors))}")
        tensor = self.tensors[name]
        view = tensor.view()
        return DensityProfile(
            view.size,
            view.density.mean * view.size,
            {k: ratio.value for k, ratio in view.densification_ratio.items() if k > 1},
            tensor.pattern if view is tensor.rows else "",
            view.density.most * view.size,
            shares=tuple(view.shares),
            union_shares=tuple(view.union_shares),
        )


def characterize(
    gradients: Sequence[Gradients] | Sequence[Sequence[Gradients]] | Gradients,
    *,
    group: Group | dist.ProcessGroup | None = None,
    sample: int | None = None,
    partitions: int | None = None,
) -> Characterization:
    """Returns figures of how sparse gradients are, how much ranks overlap, how dense their sum is, and how skewed.

    Args:
        gradients: a list with one dict per rank, from parameter name to gradient: sparse, dense, `SparseRows`, or None
            for a parameter that the rank did not use. Or a list of such lists, one per step; figures are then means
            over steps. With `group`: only this rank's dict, or a list of its dicts, one per step.
        group: the ranks that take part, of which each calls this; all get the same figures. Only indices of non-zero
            rows (and of elements, where rows have zeros) are sent. None: `gradients` has all ranks' gradients.
        sample: the most rows read of each tensor (elements, if it has no rows), the same on all ranks and in all steps;
            `footprint.DEFAULT_SAMPLE` is a good number. Dense gradients that are small, mostly non-zero or not
            contiguous then count as full. None reads everything.
        partitions: a number n for skewness beside 2, 4, ... 128. Skewness is the density of the densest of n even
            contiguous partitions of a tensor over the tensor's density.

    Raises:
        ValueError: for an empty list, names or shapes that differ between ranks, or indices out of range; with `group`
            also where another rank fails.

    Example:
        >>> a, b = torch.tensor([1.0, 2, 0, 0]), torch.tensor([0.0, 3, 0, 0])
        >>> figures = characterize([{"weight": a}, {"weight": b}]).tensors["weight"].elements
        >>> figures.density.mean, figures.densification_ratio[2].value, figures.overlap_ratio.mean
        (0.375, 1.3333333333333333, 1.0)

    Reference: Wang et al., Zen, OSDI 2025, section 2.
    """
    if group is not None:
        mine = [gradients] if isinstance(gradients, Mapping) else [g for g in gradients if isinstance(g, Mapping)]
        steps = _gathered(mine, group, sample)
    elif isinstance(gradients, Mapping):
        raise ValueError("expected the gradients of several ranks in a list, got those of one; or give its group")
    else:
        of_one_step = [ranks for ranks in gradients if isinstance(ranks, Mapping)]
        by_step = [list(ranks) for ranks in gradients if not isinstance(ranks, Mapping)]
        if of_one_step and by_step:
            raise ValueError("expected gradients of ranks, or lists of these by step, got both in one list")
        steps = [footprints_of(ranks, sample) for ranks in by_step or [of_one_step]]
    return characterize_footprints(steps, partitions=partitions)


def footprints_of(ranks: Sequence[Gradients], sample: int | None = None) -> list[Footprints]:
    """Returns, for every rank, a footprint (indices of non-zeros) of each parameter that some rank used in a step.

    Args:
        ranks: for every rank its gradients by parameter name.
        sample: the most rows read of each tensor (elements, if it has no rows); None: all.

    Raises:
        ValueError: for no ranks, names or shapes that differ between ranks, or gradients that cannot be read.
    """
    if not ranks:
        raise ValueError("expected the gradients of at least one rank, got none")
    _require_same_names(ranks)
    shapes: dict[str, Shape] = {}
    for rank, gradients in enumerate(ranks):
        for name, gradient in gradients.items():
            if gradient is not None and (shape := Shape.of(gradient)) != shapes.setdefault(name, shape):
                raise ValueError(
                    f"the gradients of {name!r} differ in shape: {shapes[name].shape}, on rank {rank} {shape.shape}"
                )
    return [{n: _footprint(n, gradients[n], shape, sample) for n, shape in shapes.items()} for gradients in ranks]


def characterize_footprints(
    steps: Sequence[Sequence[Footprints]], *, partitions: int | None = None
) -> Characterization:
    """Returns figures of density, ranks' overlap and skewness, from footprints (indices of gradients' non-zeros).

    Args:
        steps: for every step, and in it for every rank, footprints by parameter name.
        partitions: a number n for skewness beside 2, 4, ... 128: the density of the densest of n even contiguous
            partitions over the tensor's.

    Raises:
        ValueError: for no steps or ranks, or footprints that differ in names, shapes, samples or numbers of ranks.
    """
    if not steps or not steps[0]:
        raise ValueError("expected gradients of at least one step and rank, got none")
    if partitions is not None and partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    counts = {len(ranks) for ranks in steps}
    if len(counts) > 1:
        raise ValueError(f"every step needs the same number of ranks, got {sorted(counts)}")
    for ranks in steps:
        _require_same_names(ranks)
    tensors: dict[str, TensorCharacterization] = {}
    for name in dict.fromkeys(name for ranks in steps for name in ranks[0]):
        used = [[rank[name] for rank in ranks] for ranks in steps if name in ranks[0]]
        tensors[name] = _tensor(name, used, partitions)
    joined = [n for n, t in tensors.items() if t.elements.density.mean <= MOST_FOUND]
    together = [
        sparsity_of([elements_of([rank[n] for rank in ranks]) for n in joined if n in ranks[0]], partitions)
        for ranks in steps
        if any(n in ranks[0] for n in joined)
    ]
    return Characterization(
        ranks=len(steps[0]),
        steps=len(steps),
        sampled=any(t.full or t.elements.looked_at < t.elements.size for t in tensors.values()),
        tensors=tensors,
        together=mean_over_steps(together) if together else None,
    )


def _footprint(name: str, gradient: Gradient, shape: Shape, sample: int | None) -> Footprint:
    try:
        return Footprint.of(gradient, shape, sample)
    except ValueError as error:
        raise ValueError(f"the gradient of {name!r}: {error}") from None


def _require_same_names(ranks: Sequence[Mapping[str, object]]) -> None:
    for rank, mine in enumerate(ranks):
        if apart := sorted(ranks[0].keys() ^ mine.keys()):
            where = f"rank {rank} does not" if apart[0] in ranks[0] else f"rank {rank} does, rank 0 does not"
            raise ValueError(
                f"all ranks must have gradients of the same names (None where one did not use a parameter): {where} "
                f"have {apart[0]!r}"
            )


def _gathered(
    mine: Sequence[Gradients], group: Group | dist.ProcessGroup, sample: int | None
) -> list[list[Footprints]]:
    """Exchanges footprints (indices of non-zeros) in the process group; returns those of all ranks, by step and rank.

    An error on one rank raises on all.
    """
    own = None if isinstance(group, Group) else torch_group(group, timeout_s=TIMEOUT_S)
    talk = group if isinstance(group, Group) else own
    assert talk is not None
    try:
        problem: ValueError | None = None
        content = b""
        try:
            content = footprints_to_bytes([footprints_of([step], sample)[0] for step in mine])
        except ValueError as error:
            problem = error
        parts = gather_bytes(talk, content if problem is None else b"E" + str(problem).encode(), TIMEOUT_S)
    finally:
        if own is not None:
            own.close()
    if problem is not None:
        raise problem
    for rank, part in enumerate(parts):
        if part[:1] == b"E":
            raise ValueError(f"rank {rank} could not look at its gradients: {part[1:].decode()}")
    everyone = [footprints_from_bytes(part) for part in parts]
    if len({len(steps) for steps in everyone}) > 1:
        raise ValueError(f"every rank needs the same number of steps, got {[len(steps) for steps in everyone]}")
    return [_with_unused([steps[number] for steps in everyone]) for number in range(len(everyone[0]))]


def _with_unused(ranks: Sequence[Footprints]) -> list[Footprints]:
    """Returns footprints (indices of non-zeros) by rank, with empty ones added for parameters that only others used."""
    known = {name: f for rank in reversed(ranks) for name, f in rank.items()}
    nothing = {n: Footprint(f.shape, f.sampling, torch.empty(0, dtype=torch.int64)) for n, f in known.items()}
    return [{**nothing, **rank} for rank in ranks]


def _tensor(name: str, steps: Sequence[Sequence[Footprint]], partitions: int | None) -> TensorCharacterization:
    first = steps[0][0]
    for number, f in ((number, f) for ranks in steps for number, f in enumerate(ranks)):
        if f.shape != first.shape or f.sampling.step != first.sampling.step:
            raise ValueError(
                f"the gradients of {name!r} differ in shape or sample: {first.shape.shape} by {first.sampling.step}, "
                f"on rank {number} {f.shape.shape} by {f.sampling.step}"
            )
    shape, size = first.shape, len(steps[0])
    has_rows = len(shape.shape) > 1
    sparse = any(f.sparse for ranks in steps for f in ranks)
    if any(f.full for ranks in steps for f in ranks):
        rows = full_sparsity(shape.units, size, partitions) if has_rows else None
        filled = 1.0 if has_rows else None
        elements = full_sparsity(shape.numel, size, partitions)
        return TensorCharacterization(
            shape=shape.shape, sparse=sparse, full=True, elements=elements, rows=rows, filled_ratio=filled
        )
    elements = mean_over_steps([sparsity_of([elements_of(ranks)], partitions) for ranks in steps])
    if not has_rows:
        return TensorCharacterization(shape=shape.shape, sparse=sparse, full=False, elements=elements)
    in_rows = sum(len(f.units) * shape.dim for ranks in steps for f in ranks)
    return TensorCharacterization(
        shape=shape.shape,
        sparse=sparse,
        full=False,
        elements=elements,
        rows=mean_over_steps([sparsity_of([rows_of(ranks)], partitions) for ranks in steps]),
        filled_ratio=sum(_count(f) for ranks in steps for f in ranks) / in_rows if in_rows else None,
        pattern=_pattern(steps),
    )


def _count(footprint: Footprint) -> int:
    """Returns how many of the gradient's sampled elements are not zero."""
    if footprint.elements is not None:
        return len(footprint.elements)
    return len(footprint.units) * footprint.shape.dim


def _pattern(steps: Sequence[Sequence[Footprint]]) -> str:
    digest = hashlib.sha256(str(steps[0][0].shape.units).encode())
    for f in (f for ranks in steps for f in ranks):
        digest.update(len(f.units).to_bytes(8, "little") + f.units.numpy().tobytes())
    return digest.hexdigest()[:16]
