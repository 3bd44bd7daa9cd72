"""What a step shows of the gradients: the order in which they become ready, their layouts, their rows.

Every rank sees its own; `Observer.share` reduces it, so that all ranks know the same and plan alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .bucket import TensorSpec
from .density import DensityProfile, ParameterProfile
from .gradients import Gradients, RowGradients

NEVER_READY = 1 << 40  # position of a parameter that rank 0 did not use in the observed step
UNKNOWN = -1


class Observer:
    """Watches one rank's steps; `profiles` holds what all ranks know of each parameter."""

    def __init__(self, specs: Mapping[str, TensorSpec], sparse_names: Iterable[str] = ()) -> None:
        announced = set(sparse_names)
        self.profiles = {n: ParameterProfile(n, spec, sparse=n in announced) for n, spec in specs.items()}
        self._arrivals: dict[str, bool] = {}  # parameters in the order they became ready -> sparse layout

    def begin(self) -> None:
        """A new step: nothing is ready."""
        self._arrivals.clear()

    def arrived(self, name: str, *, sparse: bool) -> None:
        """The parameter's gradient is ready, in this layout."""
        self._arrivals[name] = sparse

    def layout_is_sparse(self, name: str) -> bool:
        """The layout in which the gradient came in this step here, else as the ranks agreed."""
        return self._arrivals.get(name, self.profiles[name].sparse)

    @property
    def complete(self) -> bool:
        """Whether the rows of every sparse table are known. One that no module announced travels dense at first."""
        return all(p.density is not None for p in self.profiles.values() if p.sparse)

    def share(self, gradients: Callable[[str], Gradients], gather: Callable[[Tensor], list[Tensor]]) -> None:
        """Replaces the profiles by what the finished step showed on all ranks; collective.

        `gradients(name)` is the memory that holds the parameter; `gather` hands a tensor to all ranks and returns
        everybody's, by rank.
        """
        if not self.profiles:
            return
        positions = {name: position for position, name in enumerate(self._arrivals)}
        numbers = {name: number for number, name in enumerate(self.profiles)}
        mine = torch.tensor([self._seen(name, positions, numbers, gradients(name)) for name in self.profiles])
        table = torch.stack([part.cpu().view(mine.shape) for part in gather(mine.flatten())])
        self.profiles = {
            name: _reduced(profile, table[:, index]) for index, (name, profile) in enumerate(self.profiles.items())
        }

    def _seen(
        self, name: str, positions: Mapping[str, int], numbers: Mapping[str, int], gradients: Gradients
    ) -> tuple[int, ...]:
        """(place in ready order, sparse layout, rows of mine, rows of the sum, first parameter with the same rows).

        Of one parameter; -1: not known.
        """
        layout = int(self._arrivals[name]) if name in positions else UNKNOWN
        rows, union, first = UNKNOWN, UNKNOWN, UNKNOWN
        if isinstance(gradients, RowGradients):
            rows, union = gradients.rows(name), gradients.union_rows(name)
            first = numbers[gradients.first_with_rows_of(name)]
        return positions.get(name, NEVER_READY), layout, rows, union, first


def _reduced(before: ParameterProfile, seen: Tensor) -> ParameterProfile:
    """One parameter's profile from what each rank saw; (ranks, 5) int64, columns as `Observer._seen` says."""
    layouts = set(seen[:, 1].tolist()) - {UNKNOWN}
    sparse = 1 in layouts if layouts else before.sparse
    density = None
    if sparse and int(seen[0, 2]) != UNKNOWN:
        size = len(seen)
        rows, union = float(seen[:, 2].double().mean()), float(seen[0, 3])
        growth = {size: union / rows} if rows > 0 and size > 1 else {}
        density = DensityProfile(before.tensor.num_rows, rows, growth, pattern=str(int(seen[0, 4])))
    return ParameterProfile(before.name, before.tensor, sparse, density, position=int(seen[0, 0]))
