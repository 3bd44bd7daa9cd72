"""Observation of gradients in a step: the order in which they become ready, layouts, densities of rows and elements.

Every rank sees its own gradients; `Observer.share` combines what all ranks found, so that all make the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..tensors.bucket import TensorSpec
from ..tensors.density import (
    FEWEST_SAMPLED,
    DensityProfile,
    ParameterProfile,
    ZeroSample,
    denser,
    profile_sample,
    rows_sampled,
)
from ..tensors.gradients import Gradients, RowGradients

NEVER_READY = 1 << 40  # position of a parameter that rank 0 did not use in the observed step
UNKNOWN = -1
LOOKS = 2  # at a dense gradient before it is taken for sparse: the first step's zeros may be those of initial weights


class Observer:
    """Records in which order one rank's gradients become ready, which are sparse, and how dense they are.

    `profiles` holds, by parameter name, what the ranks agreed on. Gradients of the parameters `sparse_names` are sparse
    on all ranks: if ranks gave their optimisers different layouts, their parameters would drift apart by roundings.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], sparse_names: Iterable[str] = ()) -> None:
        announced = set(sparse_names)
        self.profiles = {n: ParameterProfile(n, spec, sparse=n in announced) for n, spec in specs.items()}
        self._arrivals: dict[str, bool] = {}  # parameters in the order they became ready -> sparse layout
        self.unseen = set(specs)  # parameters whose gradients' layouts no rank has seen yet, the same on all ranks
        self._samples: dict[str, ZeroSample] = {}
        self._looks = 0

    def begin(self) -> None:
        """Starts a training step: forgets what was recorded of the gradients of the step before."""
        self._arrivals.clear()
        self._samples.clear()

    def arrived(self, *names: str, sparse: bool) -> None:
        """Records that these parameters' gradients are ready now, and whether their layout is sparse."""
        self._arrivals |= dict.fromkeys(names, sparse)

    def look(self, name: str, gradient: Tensor) -> None:
        """Samples which rows and elements of a ready gradient are zero, if it is dense and has 2^16 elements or more.

        Call it before the gradient is exchanged.
        """
        if gradient.layout is torch.strided and name in self._sampled_names():
            self._samples[name] = ZeroSample.of(gradient)

    @property
    def profiles(self) -> dict[str, ParameterProfile]:
        """The layout (dense or sparse) and densities of each parameter's gradient, as the ranks agreed, by name."""
        return self._profiles

    @profiles.setter
    def profiles(self, profiles: dict[str, ParameterProfile]) -> None:
        self._profiles = profiles
        self.sparse_names = frozenset(name for name, profile in profiles.items() if profile.sparse)

    @property
    def complete(self) -> bool:
        """Whether the first steps have shown enough to plan by: the densities of sparse and of large dense gradients.

        Dense gradients with many zeros must have been sampled in two steps, sparse ones measured once.
        """
        sampled = [self.profiles[name] for name in self._sampled_names()]
        if self._looks < LOOKS and any(p.found or p.elements is None for p in sampled):
            return False
        return all(p.density is not None for p in self.profiles.values() if p.sparse)

    @property
    def sparsity_known(self) -> bool:
        """Whether some gradient of known density is sparse, or has the dense layout but many zeros."""
        return any(p.found or (p.sparse and p.density is not None) for p in self.profiles.values())

    def take(self, profiles: Mapping[str, ParameterProfile]) -> None:
        """Replaces `profiles`, by name; layouts on which the ranks agreed already (sparse or dense) stay."""
        self.profiles = {
            name: profile if name in self.unseen else replace(profile, sparse=self.profiles[name].sparse)
            for name, profile in profiles.items()
        }

    def fits(self, profiles: Mapping[str, ParameterProfile]) -> bool:
        """Whether `profiles`, by name, are of these parameters, and of the layouts of gradients known here.

        A gradient that no rank has seen yet may have shown to be sparse in them although no module announced it.
        """
        mine = self.profiles
        return profiles.keys() == mine.keys() and all(
            known.tensor == mine[name].tensor
            and (known.sparse == mine[name].sparse or (known.sparse and name in self.unseen))
            for name, known in profiles.items()
        )

    def agree_on_layouts(self, gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Decides which gradients are sparse, among those that no rank had seen before the finished step. Collective.

        A gradient counts as sparse if it was so on any rank. `gather` sends a tensor to all ranks and returns all
        ranks' tensors, by rank.
        """
        names = sorted(self.unseen)
        seen = torch.stack([part.cpu() for part in gather(torch.tensor(list(map(self._layout, names))))])
        layouts = zip(names, seen.amax(dim=0).tolist(), strict=True)
        found = {name: bool(layout) for name, layout in layouts if layout != UNKNOWN}
        self.unseen -= found.keys()
        self.profiles |= {name: replace(self.profiles[name], sparse=sparse) for name, sparse in found.items()}

    def _layout(self, name: str) -> int:
        """Returns 1 if this rank's gradient in this step was sparse, 0 if dense, -1 without one."""
        return int(self._arrivals[name]) if name in self._arrivals else UNKNOWN

    def share(self, gradients: Callable[[str], Gradients], gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Updates `profiles` (layouts, densities, ready order) by what all ranks observed in the finished step.

        Collective.

        Args:
            gradients: returns the bucket memory of a parameter's gradient, by the parameter's name.
            gather: sends a tensor to all ranks and returns all ranks' tensors, by rank.
        """
        if not self.profiles:
            return
        positions = {name: position for position, name in enumerate(self._arrivals)}
        numbers = {name: number for number, name in enumerate(self.profiles)}
        mine = torch.tensor([self._seen(name, positions, numbers, gradients(name)) for name in self.profiles])
        table = torch.stack([part.cpu().view(mine.shape) for part in gather(mine.flatten())])
        sampled = self._share_samples(gather)
        before = self.profiles
        reduced = {name: _reduced(profile, table[:, index]) for index, (name, profile) in enumerate(before.items())}
        self.take(reduced)
        self.unseen -= {name for name, number in numbers.items() if (table[:, number, 1] != UNKNOWN).any()}
        self._looks += 1
        # At first what was once found full must be expected to be full again; later the last look counts.
        of_two = denser if self._looks <= LOOKS else _latest
        for name, found in sampled.items():
            profile = self.profiles[name]
            if not profile.sparse:
                rows, elements = map(of_two, found, (before[name].density, before[name].elements))
                exact = profile.density  # of one that travelled as a table already
                self.profiles[name] = replace(profile, density=rows if exact is None else exact, elements=elements)

    def _sampled_names(self) -> list[str]:
        """Returns parameters whose dense gradients are sampled for zeros; the same on every rank."""
        return [n for n, p in self.profiles.items() if not p.sparse and p.tensor.numel >= FEWEST_SAMPLED]

    def _share_samples(
        self, gather: Callable[[Tensor], list[Tensor]]
    ) -> dict[str, tuple[DensityProfile | None, DensityProfile | None]]:
        """Returns, by parameter, densities of (rows, elements) over all ranks, from samples sent as one bit each."""
        names = self._sampled_names()
        if not names:
            return {}
        specs = [self.profiles[name].tensor for name in names]
        mine = [self._samples.get(name) or ZeroSample.unused(spec) for name, spec in zip(names, specs, strict=True)]
        bits = torch.cat([part for sample in mine for part in (sample.rows, sample.elements)])
        packed = gather(torch.from_numpy(np.packbits(bits.numpy())))
        counts = torch.tensor([[sample.num_rows, sample.num_elements] for sample in mine])
        counted = torch.stack([part.cpu().view(counts.shape) for part in gather(counts.flatten())])
        ranks = torch.stack([torch.from_numpy(np.unpackbits(p.cpu().numpy(), count=len(bits))).bool() for p in packed])
        parts = ranks.split([len(part) for sample in mine for part in (sample.rows, sample.elements)], dim=1)
        result = {}
        seen = list(zip(names, specs, parts[::2], parts[1::2], strict=True))
        for place, (name, spec, rows, elements) in enumerate(seen):
            by_row = profile_sample(rows, counted[:, place, 0], spec.num_rows) if rows_sampled(spec) else None
            if by_row is not None:
                first = next(n for n, s, r, _ in seen if s.num_rows == spec.num_rows and torch.equal(r, rows))
                by_row = replace(by_row, pattern=f"as sampled in {first if by_row.densification else name}")
            result[name] = by_row, profile_sample(elements, counted[:, place, 1], spec.numel)
        return result

    def _seen(
        self, name: str, positions: Mapping[str, int], numbers: Mapping[str, int], gradients: Gradients
    ) -> tuple[int, ...]:
        """Returns what this rank observed of one parameter's gradient, as five whole numbers; -1: not known.

        They are its index in the order of readiness (`positions`, else `NEVER_READY`), 1 if its layout is sparse, how
        many rows are non-zero, how many in the sum over ranks, and the index (of `numbers`, which count all parameters)
        of the first parameter in the bucket whose summed gradient has the same rows.
        """
        rows, union, first = UNKNOWN, UNKNOWN, UNKNOWN
        if isinstance(gradients, RowGradients):
            rows, union = gradients.rows(name), gradients.union_rows(name)
            first = numbers[gradients.first_with_rows_of(name)]
        return positions.get(name, NEVER_READY), self._layout(name), rows, union, first


def _latest(seen: DensityProfile | None, before: DensityProfile | None) -> DensityProfile | None:
    return before if seen is None else seen


def _reduced(before: ParameterProfile, seen: Tensor) -> ParameterProfile:
    """Returns one parameter's new profile from all ranks' observations, (ranks, 5) int64, each as `Observer._seen`."""
    layouts = set(seen[:, 1].tolist()) - {UNKNOWN}
    sparse = 1 in layouts if layouts else before.sparse
    density = None
    if int(seen[0, 2]) != UNKNOWN:
        size = len(seen)
        rows, union = float(seen[:, 2].double().mean()), float(seen[0, 3])
        growth = {size: union / rows} if rows > 0 and size > 1 else {}
        most_rows = float(seen[:, 2].max())
        density = DensityProfile(before.tensor.num_rows, rows, growth, str(int(seen[0, 4])), most_rows)
    if density is not None and density.rows == 0:  # a step that did not use the table says nothing of the next one
        density = before.density or density
    return ParameterProfile(before.name, before.tensor, sparse, density, position=int(seen[0, 0]))
