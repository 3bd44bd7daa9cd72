"""The hand-over of state to another number of ranks: no gradient that was left to be sent is lost.

Rank r of the new ones takes over from the old ranks r, r + world, r + 2 world, and so on, and adds what they left to be
sent. So the sum over ranks is kept: to the bit where each new rank takes over from one old rank at most, else as
addition in the residuals' own type rounds. A mean over the ranks divides by their number, so what was left has the
weight in it that a gradient of the new ranks has, as have the gradients of all steps to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compressors import RESIDUAL, copies_at
from .saved import VERSION, Origin
from .slices import CARRIED, StateSlice, left_to_send


def redistribute(states: Sequence[Mapping[str, Any]], world: int) -> list[dict[str, Any]]:
    """Returns the states that `world` ranks load, by rank, made of the `handle.state_dict()` of all old ranks.

    Residuals, which compressors left to be sent, are handed over so that their sum over the ranks is kept. Momentum of
    compressors is added as well. State that is the same on all ranks, such as the factors of PowerSGD, is handed over
    as it is; ranks that are new begin without, and where ranks differ in it all begin anew.

    Args:
        states: one of each old rank, in any order.
        world: how many ranks are going to load.

    Raises:
        ValueError: for states that are not those of all ranks of one job at one step, each once.

    Example:
        >>> state = redistribute([torch.load(f"state.{r}.pt") for r in range(3)], 2)[rank]  # doctest: +SKIP
    """
    if type(world) is not int or world < 1:
        raise ValueError(f"world must be a number of ranks from 1 on, got {world!r}")
    ordered = _by_rank(states)
    size = len(ordered)
    if world == size:
        return [dict(state) for state in ordered]
    return [handed_over(ordered[rank::world], ordered[rank % size], rank, world) for rank in range(world)]


def handed_over(states: Sequence[Mapping[str, Any]], like: Mapping[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Returns the state for `rank` of `world`, made of those of the old ranks that it takes over from, perhaps none.

    `like`: the state of any old rank, for all that is the same on them.
    """
    return {**like, "rank": rank, "world": world, "state": _added([state["state"] for state in states])}


def _by_rank(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    for state in states:
        if (
            not isinstance(state, Mapping)
            or state.get("version") != VERSION
            or not isinstance(state.get("state"), dict)
        ):
            raise ValueError(f"expected states of version {VERSION}, as handle.state_dict() gives them")
    origins = [Origin.of(state) for state in states]
    held = sorted(origin.rank for origin in origins)
    if not origins or {origin.world for origin in origins} != {len(states)} or held != list(range(len(states))):
        found = ", ".join(f"rank {origin.rank} of {origin.world}" for origin in origins)
        raise ValueError(f"expected the states of all ranks of one job, each once, got {found or 'none'}")
    for name in ("parameters", "step", "loss_scale"):
        if len(values := {repr(state.get(name)) for state in states}) > 1:
            found = ", ".join(sorted(values))
            raise ValueError(f"the states are not of one moment of one job: their {name} differ, {found}")
    return [state for _, state in sorted(zip((o.rank for o in origins), states, strict=True), key=lambda each: each[0])]


def _added(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the state of several old ranks as one rank's.

    Ranks cut sums differently, so slices may overlap in part.
    """
    same: dict[str, Tensor] = {}
    by_point: dict[tuple[str, str], list[StateSlice]] = {}
    for state in states:
        for key, values in state.items():
            part = StateSlice.from_key(key, values)
            point, _, name = part.point.partition(".")
            copies = copies_at(point)
            if left_to_send(part):
                shared = StateSlice(
                    part.name, part.start, part.stop, f"{CARRIED}.{RESIDUAL}", part.values / (copies or 1)
                )
                by_point.setdefault((part.name, shared.point), []).append(shared)
            elif part.whole or copies > 1:  # the same on all ranks that keep it
                same.setdefault(key, part.values)
            else:
                by_point.setdefault((part.name, part.point), []).append(part)
    sums = (_sum(name, point, parts) for (name, point), parts in by_point.items())
    return {**{part.key: part.values for part in sums}, **same}


def _sum(name: str, point: str, parts: Sequence[StateSlice]) -> StateSlice:
    """Returns the sum of the slices, as one slice from the first of their elements to the last."""
    start, stop = min(part.start for part in parts), max(part.stop for part in parts)
    dtype = max((part.values.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    total = torch.zeros(stop - start, dtype=dtype, device=parts[0].values.device)
    for part in parts:
        total[part.start - start : part.stop - start] += part.values.to(total.device)
    return StateSlice(name, start, stop, point, total)
