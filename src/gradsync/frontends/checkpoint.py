"""State of all ranks as one object for checkpointing libraries, with an entry for each rank.

`torch.distributed.checkpoint` writes an entry that several ranks name only once, as if these were copies; and it reads
only entries that the reading rank names, without knowing how many ranks have written. So there are entries for as many
ranks as there may be, each named by one rank: of n ranks, rank r names entries r, r + n, r + 2 n, and so on. If n ranks
write, entries from n on are None; if n ranks read what more ranks have written, each gets the parts that it adds up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.engine_state import LOADING
from ..inputs.settings import PositiveFinite, argument
from ..state import SHARD, Shard, from_bytes, handed_over, has_ranks, place_of, read_ranks, to_bytes, write_rank
from .shard_ranks import ShardRanks
from .sharded import ShardedGradients

T = TypeVar("T")

MOST_RANKS = 1024  # entries of a checkpoint; an empty one takes a kilobyte
GATHERING, LOADING_PARTS = "gathering of state", "loading of a checkpoint"
LEFT_OUT = {"references"}  # entries of state that ranks which take over no part do not need


class Ranks(Protocol):
    """All ranks of a model, as they tell each other about state between two steps; `Peers` and `ShardRanks` are such.

    Attributes:
        rank: this rank's number among them, from 0.
        size: their number.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def agree(self, what: str, problem: Exception | None) -> None: ...

    def tell(self, what: str, mine: Any) -> list[Any]: ...

    def gather(self, what: str, mine: bytes) -> list[bytes]: ...


Find = Callable[[Ranks], object]  # returns the state that a rank is to load; called on all ranks at once


class Load(Protocol):
    """A function that waits until all ranks have come, then calls `find` and loads the state that `find` returns.

    `what` names the call in error messages; `strict` is as in `Attachment.load_state_dict`.
    """

    def __call__(self, find: Find, *, strict: bool = True, what: str = LOADING) -> None: ...


@dataclass(frozen=True)
class Source:
    """A model's synchronisation, whose state a checkpoint has and loads.

    Attributes:
        engine: returns the engine that synchronises the model.
        sharded: returns the hooks of a model in shards, or None.
        state_dict: returns this rank's state.
        met: lets all ranks come together between two steps for the purpose that it is given, for a `with` block.
        load: loads state on all ranks.
    """

    engine: Callable[[], Engine]
    sharded: Callable[[], ShardedGradients | None]
    state_dict: Callable[[], dict[str, Any]]
    met: Callable[[str], AbstractContextManager[Ranks]]
    load: Load


class _NothingSavedError(Exception):
    """No rank has found a file."""


class RankBytes(bytes):
    """The state of one rank as bytes (`gradsync.state.to_bytes`), for libraries that take text, bytes and tensors only.

    `torch.save` stores bytes as text, half as long again and slowly. So it gets a tensor of uint8 instead, which
    loading returns; code that copies objects gets bytes. (`torch.save` is told by pickle's protocol 2, which only it
    uses.)
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol == 2:
            return torch.frombuffer(bytearray(self), dtype=torch.uint8).__reduce_ex__(protocol)
        return super().__reduce_ex__(protocol)


class Checkpoint:
    """The state of all ranks, with an entry for each rank, to save and load; `Attachment.checkpoint` makes one."""

    def __init__(self, source: Source, *, gather: bool) -> None:
        self._source, self._gather = source, gather

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state under its own key, such as "rank 3", as bytes; with `gather`, all ranks' states.

        Entries for ranks that do not exist have None, divided among the ranks: on rank 3 of 8 they are "rank 11", "rank
        19", ... to 1023, so that a checkpoint can be loaded on more ranks. With `gather` the entries are tensors of
        bytes, (nbytes,) uint8, and the call is collective.

        Raises:
            RuntimeError: after `detach`, and with `gather` inside a step and where another rank has no state to save.
            ValueError: without `gather`, for more ranks than a checkpoint has entries for.
            GroupError: with `gather`, on all ranks, if only some gather.
        """
        if self._gather:
            with self._source.met(GATHERING) as ranks:
                mine = _on_all(ranks, lambda: to_bytes(self._source.state_dict()), GATHERING)
                parts = ranks.gather(GATHERING, mine)
            return {_entry(r): torch.frombuffer(bytearray(part), dtype=torch.uint8) for r, part in enumerate(parts)}
        saved = self._source.state_dict()
        rank, size = place_of(saved)
        if size > MOST_RANKS:
            raise ValueError(
                f"a checkpoint has entries for {MOST_RANKS} ranks, there are {size}: save each rank's state_dict(), "
                "and load what gradsync.state.redistribute makes of them"
            )
        mine = RankBytes(to_bytes(saved))
        return {_entry(r): mine if r == rank else None for r in range(rank, MOST_RANKS, size)}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads what `state_dict` returned on these ranks, or on another number of ranks; call it on all ranks.

        Args:
            strict: as in `Attachment.load_state_dict`.

        Raises:
            TypeError, ValueError, RuntimeError, GroupError: on all ranks, before anything has changed: as
                `Attachment.load_state_dict`, and if parts of ranks are missing.
        """
        self._source.load(
            lambda ranks: self._own_state(ranks, lambda: state, strict=strict), strict=strict, what=LOADING_PARTS
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes this rank's state to its file in the folder, `gradsync-rank-3-of-8.safetensors`; call it on all ranks.

        Raises:
            RuntimeError: after `detach`, when there is no state.
            OSError: if the folder cannot be written.
        """
        write_rank(folder, self._source.state_dict())

    def load(self, folder: str | os.PathLike[str], *, strict: bool = True, missing_ok: bool = False) -> bool:
        """Loads what `save` wrote on these ranks, or on another number of ranks; call it on all ranks.

        Args:
            folder: the folder that was given to `save`.
            strict: as in `Attachment.load_state_dict`.
            missing_ok: load nothing where no rank finds a file in the folder, as in a checkpoint of another program.

        Returns:
            Whether state was loaded.

        Raises:
            gradsync.state.MissingStateError: if the folder lacks files of ranks whose state this rank must load; a
            ValueError.
            TypeError, ValueError, RuntimeError, GroupError: on all ranks, before anything has changed, as
                `load_state_dict`, and if another rank lacks files.
        """

        def find(ranks: Ranks) -> Mapping[str, Any]:
            if missing_ok and not any(ranks.tell(LOADING, _on_all(ranks, lambda: has_ranks(folder)))):
                raise _NothingSavedError
            return self._own_state(ranks, lambda: read_ranks(folder, ranks.rank, ranks.size), strict=strict)

        try:
            self._source.load(find, strict=strict, what=LOADING_PARTS)
        except _NothingSavedError:  # on all ranks
            return False
        return True

    def _own_state(self, ranks: Ranks, find: Callable[[], object], *, strict: bool) -> Mapping[str, Any]:
        """Returns this rank's saved state, or a sum of some ranks' (perhaps none) if another number of ranks saved.

        All ranks raise if the state of some saved rank is missing.
        """

        def read() -> dict[int, dict[str, Any]]:
            parts = _parts(find(), ranks.rank, ranks.size)
            for part in parts.values():
                self._require_kind(part, strict=strict)
                argument("loss_scale", part.get("loss_scale"), PositiveFinite | None)
            return parts

        parts = _on_all(ranks, read)
        mine = [
            [*place_of(part), _shards_of(part), repr(part.get("step")), part.get("loss_scale")]
            for part in parts.values()
        ]
        told = [each for theirs in ranks.tell(LOADING, mine) for each in theirs]
        world = _world_of([(rank, of) for rank, of, *_ in told])
        sharded = self._source.sharded()
        if sharded is not None:
            shards, step = _shards_and_step([(count, step) for _, _, count, step, _ in told])
            if shards != sharded.shard.count:
                scale = _scale_of([scale for *_, scale in told])
                return self._of_other_shards(ranks, list(parts.values()), step, scale)
        if world == ranks.size:
            return parts[ranks.rank]
        return self._of_other_ranks(ranks, list(parts.values()))

    def _require_kind(self, part: Mapping[str, Any], *, strict: bool) -> None:
        """Checks that a rank's saved state is of a model in shards if this one is, and of the same if `strict`."""
        sharded = self._source.sharded()
        if sharded is None:
            if _shards_of(part) > 1:
                raise ValueError(
                    f"the state is of a model in {_shards_of(part)} shards, and this model is in none: load it into a "
                    "model in shards (of one shard, if need be)"
                )
            return
        saved = Shard.of(part)
        if strict:
            sharded.require_model(saved)

    def _of_other_ranks(self, ranks: Ranks, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the state that this rank takes over from the parts that it has read; another number of ranks saved.

        In shards each rank has read parts of its own shard.
        """
        engine = self._source.engine()
        peers = engine.peers
        mine = {key: value for key, value in parts[0].items() if key not in LEFT_OUT} if peers.rank == 0 else {}
        packed = _on_all(ranks, lambda: to_bytes({**mine, "state": {}}))
        told = peers.gather(LOADING, packed)

        def taken_over() -> dict[str, Any]:
            like = from_bytes(told[0])
            steps = sorted({repr(part.get("step")) for part in (*parts, like)})
            if len(steps) > 1:
                raise ValueError(f"the parts are of different steps: {', '.join(steps)}")
            return handed_over(parts, parts[0] if parts else like, peers.rank, peers.size)

        return _on_all(ranks, taken_over)

    def _of_other_shards(
        self, ranks: Ranks, parts: Sequence[Mapping[str, Any]], step: int, scale: float | None
    ) -> Mapping[str, Any]:
        """Returns the state for this rank's shard, of the parts of other shards that its replica has read.

        Any replica may have read any part: the sum over replicas, which counts, stays. `step` and `scale`, the loss
        scale in whose units state is, are those of the checkpoint.
        """
        sharded = self._source.sharded()
        assert sharded is not None and isinstance(ranks, ShardRanks)
        state = ranks.taken_over(LOADING, parts, sharded.shard)
        return {**self._source.state_dict(), "step": step, "state": state, "loss_scale": scale, "per_rank": True}


def _on_all(ranks: Ranks, make: Callable[[], T], what: str = LOADING) -> T:
    """Returns `make()`, which must not be collective, if it succeeds on all ranks; else all raise. Collective.

    `what` names the operation in the errors of the other ranks.
    """
    problem: Exception | None = None
    try:
        made = make()
    except Exception as error:  # told to all, then raised
        problem = error
    ranks.agree(what, problem)
    return made


def _shards_and_step(told: Sequence[tuple[int, str]]) -> tuple[int, int]:
    """Returns the number of shards and the step of which all parts are, given these of each part.

    Raises:
        ValueError: for parts of several numbers of shards or steps, or of a step that is no whole number.
    """
    shards, steps = ({each[at] for each in told} for at in (0, 1))
    step = ", ".join(sorted(map(str, steps)))
    if len(shards) > 1 or not step.isdecimal():
        found = ", ".join(map(str, sorted(shards)))
        raise ValueError(
            f"{LOADING}: expected the parts of one checkpoint, got parts of step {step}, of models of {found} shards"
        )
    return int(next(iter(shards))), int(step)


def _scale_of(told: Sequence[float | None]) -> float | None:
    """Returns the loss scale in whose units all state is, given that of each part; None in parts without state.

    Raises:
        ValueError: for parts with several loss scales.
    """
    found = {repr(scale): scale for scale in told if scale is not None}
    if len(found) > 1:
        raise ValueError(
            f"{LOADING}: expected the parts of one checkpoint, got state at the loss scales {', '.join(sorted(found))}"
        )
    return next(iter(found.values()), None)


def _entry(rank: int) -> str:
    return f"rank {rank}"


def _shards_of(part: Mapping[str, Any]) -> int:
    """Returns the number of shards of the model that a state is of; 1 for a model that was not in shards."""
    return Shard.of(part).count if SHARD in part else 1


def _parts(saved: object, rank: int, size: int) -> dict[int, dict[str, Any]]:
    """Returns the saved parts that rank `rank` of `size` is to load, by the rank that wrote them."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"expected the dict that checkpoint().state_dict() gave, got {type(saved).__name__}")
    parts: dict[int, dict[str, Any]] = {}
    for name, content in saved.items():
        form = re.fullmatch(r"rank ([0-9]{1,9})", name) if isinstance(name, str) else None
        if form is None:
            raise ValueError(
                f"expected what checkpoint().state_dict() gave, with entries such as {_entry(0)!r}, got {name!r}: what "
                "state_dict() of the handle gave is for its load_state_dict(), on each rank its own"
            )
        if content is None or int(form[1]) % size != rank:
            continue
        part = from_bytes(_content(name, content))
        if (rank_of := place_of(part)[0]) != int(form[1]):
            raise ValueError(f"the part {name!r} is that of rank {rank_of}")
        parts[int(form[1])] = part
    return dict(sorted(parts.items()))


def _content(name: str, part: object) -> bytes:
    if isinstance(part, Tensor) and part.dtype is torch.uint8 and not part.is_meta:
        return part.cpu().reshape(-1).numpy().tobytes()
    if isinstance(part, bytes):
        return part
    kind = f"a tensor of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
    raise ValueError(f"the part {name!r} must be bytes, got {kind}")


def _world_of(held: Sequence[tuple[int, int]]) -> int:
    """Returns how many ranks wrote the parts, given (rank, world) of each.

    Raises:
        ValueError: unless these are the parts of all ranks of one job.
    """
    worlds = {world for _, world in held}
    ranks = sorted(rank for rank, _ in held)
    if len(worlds) == 1 and ranks == list(range(len(ranks))) and worlds == {len(ranks)}:
        return len(ranks)
    found = ", ".join(f"rank {rank} of {world}" for rank, world in sorted(held, key=lambda each: each[0])) or "none"
    raise ValueError(
        f"{LOADING}: the checkpoint must have the parts of all ranks that saved it, these ranks found {found}. Where a "
        "library lets rank 0 alone write, save handle.checkpoint(gather=True)"
    )
