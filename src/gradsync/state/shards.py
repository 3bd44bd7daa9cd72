"""The shard that the state of a model in shards is of, and its way to other shards, as on a mesh with more of them.

Replicas are the ranks of which `handle.rank` counts; each of them is again some ranks, with a shard each. State names
elements of its rank's shard. A shard is a range of consecutive elements of each whole parameter, so state that belongs
to single elements, as residuals (gradients not sent yet), moves to whatever rank has these elements in its shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from ..compressors import copies_at
from ..inputs.settings import NonNegativeInt, PositiveInt, checked
from .handover import sum_of_states
from .saved import VERSION, Origin
from .slices import StateSlice, left_to_send

SHARD = "shard"
"""The key of a `state_dict` that says which shard it is of."""


@dataclass(frozen=True)
class Shard:
    """The shard of a model that a rank has, as it is named in the `state_dict` of a model in shards.

    Attributes:
        index: which of the shards.
        count: the number of shards.
        model: SHA-256 over names, element types and whole shapes of the parameters, the same for all shards.
        ranges: by parameter, the range [start, stop) of elements of the flattened whole parameter that this shard
            consists of, and the whole parameter's number of elements; None where these elements are not consecutive.
    """

    index: NonNegativeInt
    count: PositiveInt
    model: str
    ranges: dict[str, tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Shard:
        """Returns the shard that a `state_dict` was saved from.

        Raises:
            ValueError: if its entry is missing, as in the state of a model that was not in shards, or malformed.
        """
        given = state.get(SHARD)
        if not isinstance(given, Mapping):
            raise ValueError(
                "the state is of a model that was not in shards, and this model is: load it into a model as it was"
            )
        names = [entry.name for entry in fields(cls)]
        shard = cls(**checked(cls, {name: given.get(name) for name in names}, "the state's shard's "))
        if shard.index >= shard.count:
            raise ValueError(f"the state's shard must be below the number of shards, got {shard.place}")
        for name, place in shard.ranges.items():
            if place is not None and not place[0] <= place[1] <= place[2]:
                raise ValueError(
                    f"the state's shard of {name!r} must be a range of {place[2]} elements, got {place[:2]}"
                )
        return shard

    @property
    def place(self) -> str:
        """The shard among the others in words, for errors."""
        return f"{self.index} of {self.count}"

    def entry(self) -> dict[str, Any]:
        """Returns the entry of a `state_dict` that tells of which shard it is."""
        return {SHARD: asdict(self)}


def place_of(state: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of the rank that a state is of, and how many ranks its model had, shards of replicas included.

    Ranks are counted replica by replica. Of a model that was not in shards these are its rank and the number of ranks.

    Raises:
        ValueError: if entries that say it are missing or malformed.
    """
    origin = Origin.of(state)
    if SHARD not in state:
        return origin.rank, origin.world
    shard = Shard.of(state)
    return origin.rank * shard.count + shard.index, origin.world * shard.count


def moved(states: Sequence[Mapping[str, Any]], target: Shard) -> dict[str, Tensor]:
    """Returns what compressors kept, in states of any ranks, for the elements of another shard; equal elements added.

    The result is the "state" of a rank with the shard `target`: tensors by key, (elements,) each. Residuals go by the
    whole parameter's elements, as does other state of single elements. State that belongs to a shard as a whole, such
    as the factors of PowerSGD or choices of chunks, and what several ranks kept alike is left out, but for residuals.

    Args:
        states: the `state_dict` of ranks of a model with the same parameters, in any shards.
        target: the shard whose elements are wanted.

    Raises:
        ValueError: for states of another version or without shards, or if shards are not consecutive elements.
    """
    return sum_of_states([_moved(state, Shard.of(state), target) for state in states])


def _moved(state: Mapping[str, Any], source: Shard, target: Shard) -> dict[str, Tensor]:
    if state.get("version") != VERSION or not isinstance(state.get("state"), Mapping):
        raise ValueError(f"expected states of version {VERSION}, as handle.state_dict() gives them")
    found: dict[str, Tensor] = {}
    for key, values in state["state"].items():
        part = StateSlice.from_key(key, values)
        if part.whole or (copies_at(part.point.partition(".")[0]) > 1 and not left_to_send(part)):
            continue
        piece = _in_target(part, source, target)
        if piece is not None:
            found[piece.key] = piece.values
    return found


def _in_target(part: StateSlice, source: Shard, target: Shard) -> StateSlice | None:
    """Returns the elements of a slice that the other shard has, counted from that shard's first; None: it has none."""
    if part.name not in source.ranges:
        raise ValueError(f"the state holds {part.key!r}, and its shard has nothing of this parameter")
    if part.name not in target.ranges:  # of another model, where that is not refused
        return None
    before, after = source.ranges[part.name], target.ranges[part.name]
    if before is None or after is None:
        raise ValueError(
            f"{part.name!r} is in shards along another than its first dimension, whose state another number of shards "
            "cannot take over: load it on the same number of shards"
        )
    if before[2] != after[2]:
        return None
    if part.stop > before[1] - before[0]:
        raise ValueError(f"the state {part.key!r} reaches beyond its shard, of {before[1] - before[0]} elements")
    low = max(part.start + before[0], after[0])
    high = min(part.stop + before[0], after[1])
    if low >= high:
        return None
    first = part.start + before[0]
    return StateSlice(part.name, low - after[0], high - after[0], part.point, part.values[low - first : high - first])
