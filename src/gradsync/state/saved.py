"""Checks a checkpoint's `state_dict`, and the rank and model that it was saved from, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any

from annotated_types import Interval

from ..inputs.files import from_json
from ..inputs.settings import NonNegativeInt, PositiveFinite, PositiveInt, checked
from ..tensors.bucket import TensorSpec
from .slices import StateSlice

VERSION = 3  # 1 had elements in memory order, 2 had no origin
"""The version of a `state_dict`, the only one that is read."""
MOST_STEPS = 1 << 53  # a larger step number is refused as damage
THE_STATES = "the state's "  # before an entry's name in errors
NOT_STRICT = "load_state_dict(..., strict=False)"
"""The call that drops state without a place, as errors name it."""


@dataclass(frozen=True)
class Origin:
    """The rank and the model that a saved state is of.

    Attributes:
        rank: the rank.
        world: the number of ranks.
        parameters: SHA-256 over names, shapes and element types of the parameters.
        per_rank: whether ranks kept state of their own, such as residuals (gradients not sent yet), so that each must
            load its own.
    """

    rank: NonNegativeInt
    world: PositiveInt
    parameters: str
    per_rank: bool

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Origin:
        """Returns the rank and model that a `state_dict` was saved from, as named in its entries.

        Raises:
            ValueError: if "rank", "world", "parameters" or "per_rank" is missing or malformed.
        """
        names = [entry.name for entry in fields(cls)]
        found = cls(**checked(cls, {name: saved.get(name) for name in names}, THE_STATES))
        if found.rank >= found.world:
            raise ValueError(
                f"the state's rank must be below its world, the number of ranks, got {found.rank} of {found.world}"
            )
        return found

    def entries(self) -> dict[str, Any]:
        """Returns entries that tell in a `state_dict` where it is from: "rank", "world", "parameters", "per_rank"."""
        return asdict(self)


@dataclass(frozen=True)
class _Entries:
    """The entries of a `state_dict`, beside its origin, that every engine reads."""

    step: Annotated[int, Interval(ge=0, lt=MOST_STEPS)]
    plan: str
    loss_scale: PositiveFinite | None  # in whose units the state is; None: the loss was not scaled


@dataclass(frozen=True)
class _Part:
    """The part of a bucket that is read of the plan under which the state was saved."""

    segments: tuple[tuple[str, NonNegativeInt, NonNegativeInt], ...]


@dataclass(frozen=True)
class Saved:
    """The checked contents of an engine's `state_dict`: who saved it, at which step, and the state of its schemes.

    Attributes:
        origin: the rank and the model that the state is of.
        step: the number of training steps done.
        scale: the loss scale in whose units the state is; None: the loss was not scaled.
        slices: tensors of schemes and compressors, such as residuals, each for a range of a parameter's elements.
    """

    origin: Origin
    step: int
    scale: float | None
    slices: list[StateSlice]


def examined(saved: object, specs: Mapping[str, TensorSpec], *, strict: bool) -> Saved:
    """Checks a `state_dict` of an engine, before anything is changed, and returns its contents.

    Args:
        saved: what `Engine.state_dict` returned.
        specs: shape and dtype of each of this model's parameters, by name.
        strict: False: state of parameters that this model does not have, or has in another size, is left out.

    Raises:
        TypeError: for anything else than a dict.
        ValueError: for another version of the format, for values that are not finite, for two slices of state for the
            same elements of a parameter, and, if `strict`, for state of parameters that this model does not have.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"expected the dict that state_dict() gave, got {type(saved).__name__}")
    version = saved.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"expected a gradsync state of version {VERSION}, got version {version!r}: load it with the gradsync that "
            "saved it, or begin anew without"
        )
    for name in ("state", "step", "plan"):
        if name not in saved:
            raise ValueError(f"the state has no {name!r}: it is not what state_dict() gave")
    names = [entry.name for entry in fields(_Entries)]
    entries = _Entries(**checked(_Entries, {name: saved.get(name) for name in names}, THE_STATES))
    numels = _numels(entries.plan)
    origin = Origin.of(saved)
    try:
        slices = _slices_of(saved["state"])
        if strict:
            _require_known(slices, specs)
        else:
            slices = _in_common(slices, specs, numels)
        _require_inside(slices, specs)
        _require_once(slices)
    except ValueError as error:
        raise ValueError(f"{error} (saved on rank {origin.rank} of {origin.world})") from None
    return Saved(origin, entries.step, entries.loss_scale, slices)


def _slices_of(state: object) -> list[StateSlice]:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state's 'state' must be a dict of tensors, got {type(state).__name__}")
    return [StateSlice.from_key(key, values) for key, values in state.items()]


def _require_known(slices: Sequence[StateSlice], specs: Mapping[str, TensorSpec]) -> None:
    for part in slices:
        if part.name not in specs:
            raise ValueError(
                f"the state holds {part.name!r}, which is no parameter to synchronise here: drop it by {NOT_STRICT}"
            )


def _numels(plan: str) -> dict[str, int]:
    """Returns the number of elements that each parameter has in a saved plan, of which nothing else is read."""
    try:
        data = from_json(plan, "state's plan")
        buckets = data.get("buckets") if isinstance(data, dict) else None
        if not isinstance(buckets, list):
            raise ValueError("it has no list of buckets")
        numels: dict[str, int] = {}
        for bucket in buckets:
            segments = bucket.get("segments") if isinstance(bucket, dict) else None
            for name, start, stop in checked(_Part, {"segments": segments}, "a bucket's ")["segments"]:
                numels[name] = numels.get(name, 0) + stop - start
    except ValueError as error:
        raise ValueError(f"the state's plan is none: {error}") from None
    return numels


def _in_common(
    slices: Sequence[StateSlice], specs: Mapping[str, TensorSpec], numels: Mapping[str, int]
) -> list[StateSlice]:
    """Returns the slices of parameters that have the same number of elements in this model as in the saved plan."""
    return [part for part in slices if part.name in specs and numels.get(part.name) == specs[part.name].numel]


def _require_inside(slices: Sequence[StateSlice], specs: Mapping[str, TensorSpec]) -> None:
    for part in slices:
        if part.stop > specs[part.name].numel:
            raise ValueError(
                f"the state of {part.name!r} reaches to element {part.stop}, the parameter has {specs[part.name].numel}"
            )


def _require_once(slices: Sequence[StateSlice]) -> None:
    """Checks that no element of a parameter is in two slices of one compress point.

    Raises:
        ValueError: naming the parameter.
    """
    by_place: dict[tuple[str, str, bool], list[StateSlice]] = {}
    for part in slices:
        by_place.setdefault((part.name, part.point, part.whole), []).append(part)
    for parts in by_place.values():
        keys = {(part.start, part.stop): part for part in parts}
        filled = sorted((part for part in parts if part.start < part.stop), key=lambda part: part.start)
        twice = [(keys[part.start, part.stop], part) for part in parts if keys[part.start, part.stop] is not part]
        overlapping = [(one, other) for one, other in pairwise(filled) if other.start < one.stop]
        for one, other in [*twice, *overlapping]:
            raise ValueError(f"the states {one.key!r} and {other.key!r} overlap: elements are there twice")


def refusal(origins: Sequence[Origin], parameters: str) -> str:
    """Returns an error text if ranks must not load these states, as they are of other ranks or another model; else "".

    Args:
        origins: for each rank, the rank and model that the state it was given is of.
        parameters: SHA-256 over names, shapes and element types of this model's parameters.
    """
    world = len(origins)
    for rank, origin in enumerate(origins):
        if origin.parameters != parameters:
            return (
                f"the state on rank {rank} is of a model with other parameters: their names, shapes and element types "
                f"have the digest {origin.parameters[:12]}, here {parameters[:12]}; load the state of this model, or "
                f"take what both have in common by {NOT_STRICT}"
            )
    if not any(origin.per_rank for origin in origins):
        return ""
    for rank, origin in enumerate(origins):
        if origin.world != world:
            return (
                f"the state on rank {rank} is that of rank {origin.rank} of {origin.world}, now there are {world} "
                "ranks: what was left to be sent would be lost, or sent twice. Save and load handle.checkpoint(), "
                f"which hands it over, or load what gradsync.state.redistribute(states, {world}) makes of the states "
                f"of all {origin.world} ranks"
            )
    loaded: dict[int, list[int]] = {}
    for rank, origin in enumerate(origins):
        loaded.setdefault(origin.rank, []).append(rank)
    advice = (
        "each rank loads what it saved. Where a framework writes one file for all ranks, or one entry, save and load "
        "handle.checkpoint(), or handle.checkpoint(gather=True) where only rank 0 writes"
    )
    for saved_on, ranks in loaded.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} were given the same state, that of rank {saved_on}: {advice}"
        if ranks != [saved_on]:
            return f"rank {ranks[0]} was given the state of rank {saved_on}: {advice}"
    return ""


def without_state(saved: Saved) -> Saved:
    """Returns the contents without what schemes and compressors keep; origin, step and loss scale stay."""
    return replace(saved, slices=[])
