"""Turns the state of all ranks into state for another number of ranks; residuals (gradients not sent yet) are kept.

New rank r gets the state of the old ranks r, r + world, r + 2 world, and so on, with the sum of their residuals. So the
residuals' sum over all ranks stays: to the bit where each new rank gets one old rank's at most, else up to rounding in
the residuals' type. A mean over the new ranks gives residuals the same weight as new gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compressors import RESIDUAL, copies_at
from ..inputs.settings import PositiveInt, argument
from .saved import VERSION, Origin
from .slices import CARRIED, StateSlice, left_to_send


def redistribute(states: Sequence[Mapping[str, Any]], world: int) -> list[dict[str, Any]]:
    """Returns the states that `world` ranks load, by rank, made of the `handle.state_dict()` of all old ranks.

    Residuals, which compressors left to be sent, are handed over so that their sum over the ranks is kept. Momentum of
    compressors is added as well. State that is the same on all ranks, such as the factors of PowerSGD, is handed over
    as it is; additional ranks get none of it, and where ranks then differ at loading, all begin anew. Of a model in
    shards ranks are replicas: what is returned is for the ranks with the shard whose states were given.

    Args:
        states: one of each old rank, in any order.
        world: how many ranks are going to load.

    Raises:
        ValueError: for states that are not those of all ranks of one job at one step, each once.

    Example:
        >>> state = redistribute([torch.load(f"state.{r}.pt") for r in range(3)], 2)[rank]  # doctest: +SKIP
    """
    argument("world", world, PositiveInt)
    ordered = _by_rank(states)
    size = len(ordered)
    if world == size:
        return [dict(state) for state in ordered]
    return [handed_over(ordered[rank::world], ordered[rank % size], rank, world) for rank in range(world)]


def handed_over(states: Sequence[Mapping[str, Any]], like: Mapping[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Returns the state that rank `rank` of `world` ranks loads, when another number of ranks has saved.

    What compressors kept on each of the old ranks in `states` (perhaps none) is added up; what is equal on all ranks is
    taken once.

    Args:
        states: the states that this rank takes over.
        like: the state of any old rank, which gives all entries that are the same on all ranks.
    """
    return {**like, "rank": rank, "world": world, "state": sum_of_states([state["state"] for state in states])}


def _by_rank(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    for state in states:
        if (
            not isinstance(state, Mapping)
            or state.get("version") != VERSION
            or not isinstance(state.get("state"), dict)
        ):
            raise ValueError(f"expected states of version {VERSION}, as handle.state_dict() gives them")
    shards = sorted({str(shard.get("index")) for state in states if isinstance(shard := state.get("shard"), Mapping)})
    if len(shards) > 1:
        raise ValueError(
            f"the states are of shards {', '.join(shards)} of a model: give those of all replicas with one shard, and "
            "load the result there. On another number of shards, save and load handle.checkpoint()"
        )
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


def sum_of_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the scheme states of several ranks of the saved job as one rank's state, by `StateSlice.key`.

    Slices are added element by element; what all ranks keep alike is taken once. Slices of one parameter may differ in
    range, as each rank compresses the sums of other elements.

    `states`: the "state" of each rank's `state_dict`: tensors by key, (elements,) or, of whole segments, of any shape.
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
    """Returns the sum of slices of one parameter, as one slice from the first of their elements to the last."""
    start, stop = min(part.start for part in parts), max(part.stop for part in parts)
    dtype = max((part.values.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    total = torch.zeros(stop - start, dtype=dtype, device=parts[0].values.device)
    for part in parts:
        total[part.start - start : part.stop - start] += part.values.to(total.device)
    return StateSlice(name, start, stop, point, total)
