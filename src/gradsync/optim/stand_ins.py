"""Parameters that stand in an optimiser's groups for others, during one step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer


class StandIns:
    """Puts other parameters into an optimiser's groups, in the places of its own, until `put_back`.

    Several of these may be in force at a time, for different parameters, and end in any order.
    """

    def __init__(self, optimizer: Optimizer, pairs: Iterable[tuple[Tensor, nn.Parameter]]) -> None:
        """Puts the second of each of the pairs where the optimiser has the first."""
        self._optimizer, self._pairs = optimizer, list(pairs)
        self._exchange({id(own): stand_in for own, stand_in in self._pairs})

    def put_back(self) -> None:
        """Gives the optimiser its own parameters back; a second call does nothing."""
        self._exchange({id(stand_in): own for own, stand_in in self._pairs})
        self._pairs.clear()

    def _exchange(self, instead: dict[int, Tensor]) -> None:
        for group in self._optimizer.param_groups:
            group["params"][:] = [instead.get(id(p), p) for p in group["params"]]


def left_out(parameter: Tensor) -> nn.Parameter:
    """Returns a stand-in of shape (0,) without a gradient, which optimisers skip."""
    return nn.Parameter(parameter.detach().new_empty(0))
