"""All ranks of a model in shards, which tell each other of failures and meet to load or gather state.

Ranks with the same shard, one of each replica, are an engine's group. Here these groups meet, within each replica.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..comm import Group
from ..devices.streams import streams_of
from ..engine.engine import Engine
from ..engine.peers import Peers, said
from ..state import Shard, from_bytes, moved, sum_of_states, to_bytes

NUMBER_BYTES = 8  # of a rank's number before what it sends


class OtherShardError(RuntimeError):
    """An error: ranks with another shard have failed, and have said why."""


class ShardRanks:
    """All ranks of a model in shards. Where synchronisation stops on one of them, it does on all.

    Between two steps they meet (`met`) for calls that all of them make. Ranks of a replica then tell each other
    everything in one way, `within`, each time with the same collectives. So a rank that fails can tell it there,
    whatever the others want to do.

    Args:
        engine: exchanges between the replicas.
        replica: the ranks of this rank's replica, by shard.
    """

    def __init__(self, engine: Engine, replica: Group) -> None:
        self._engine = engine
        self._replica = Peers(
            replica, engine.device, streams_of(engine.device), timeout_s=engine.timeout_s, step=lambda: engine.step
        )
        self._replica.beside, engine.peers.beside = engine.peers, self._replica

    def close(self) -> None:
        """Closes the group of this rank's replica; the engine's stays."""
        self._replica.close()

    def fail(self, why: BaseException) -> None:
        """Stops all synchronisation, and tells all ranks of the model why."""
        self._replica.fail(why)

    def summed(self, flags: Tensor) -> Tensor:
        """Returns flags of the step that has just ended, (numbers,), summed over this rank's replica. Collective.

        The host does not wait for a device.

        Raises:
            GroupError: where another rank of the replica has failed, or does not come in time.
        """

        def total(group: Group) -> Tensor:
            return group.all_reduce(flags.to(group.payload_device)).wait(self._engine.timeout_s).to(flags.device)

        if self._replica.size == 1:
            return flags
        found: Tensor = self._replica.call("the end of the step in all shards", total, step=self._engine.step - 1)
        return found

    @property
    def rank(self) -> int:
        """This rank's number among all ranks of the model, from 0: those of the replicas, one after the other.

        Replicas are counted for each shard apart, by the group of the ranks with this shard.
        """
        return self._engine.group.rank * self._replica.size + self._replica.rank

    @property
    def size(self) -> int:
        """The number of ranks of the model: that of replicas times that of shards."""
        return self._engine.group.size * self._replica.size

    def agree(self, what: str, problem: Exception | None = None) -> None:
        """Raises on every rank of the model if some rank has a `problem`, its own where this rank has one. Collective.

        `what`: names the operation, for messages.
        """
        told = self.tell(what, None if problem is None else said(problem))
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(told):
            if theirs is not None:
                raise RuntimeError(f"{what}: rank {rank} could not: {theirs}")

    def tell(self, what: str, mine: Any) -> list[Any]:
        """Sends the JSON value `mine` to all ranks of the model; returns all ranks' values, by rank. Collective."""
        return [json.loads(part) for part in self.gather(what, json.dumps(mine).encode())]

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        """Sends bytes, at least one, to all ranks of the model; returns all ranks' bytes, by rank. Collective."""
        numbered = self.rank.to_bytes(NUMBER_BYTES, "big") + mine
        told = [part for each in self.within(what, numbered) for part in self._engine.peers.gather(what, each)]
        # Replicas may be in another order in the group of each shard, and so in each rank's list.
        return [part[NUMBER_BYTES:] for part in sorted(told, key=lambda part: part[:NUMBER_BYTES])]

    def within(self, what: str, mine: bytes, *, is_failure: bool = False) -> list[bytes]:
        """Sends bytes to the ranks of this rank's replica; returns theirs, by shard. Collective.

        Args:
            what: names the operation, for messages.
            mine: the bytes.
            is_failure: whether this rank has failed, and `mine` is the text of its error.

        Raises:
            OtherShardError: unless `is_failure`, where another rank has failed.
            GroupError: where a rank of the replica was lost or does something else.
        """
        parts = self._replica.gather(what, bytes([is_failure]) + mine)
        for shard, part in enumerate(parts):
            if part[0] and not is_failure:
                raise OtherShardError(f"a rank with shard {shard} could not: {part[1:].decode()}")
        return [part[1:] for part in parts]

    def taken_over(self, what: str, states: Sequence[Mapping[str, Any]], mine: Shard) -> dict[str, Tensor]:
        """Returns what compressors kept for the elements of this rank's shard, in states that its replica has read.

        The result has tensors by key, as the "state" of a `state_dict`, of shape (elements,) each. Residuals of one
        element are added. What one rank takes over at a time is sent to all of the replica. Collective.

        Args:
            what: names the operation, for messages.
            states: the states that this rank has read, each once on all ranks: those of a model in any shards.
            mine: this rank's shard.

        Raises:
            ValueError, RuntimeError: on all ranks of the model, where the states of one cannot be taken over.
        """
        problem: Exception | None = None
        parts: list[bytes] = []
        found: dict[str, Tensor] = {}
        for shard, target in enumerate(self.within(what, json.dumps(mine.entry()).encode())):
            packed = b""
            try:
                packed = to_bytes(moved(states, Shard.of(json.loads(target))))
            except Exception as error:  # told to all, then raised
                problem = error
            told = self.within(what, packed)
            parts = told if shard == self._replica.rank else parts
        self.agree(what, problem)
        try:
            found = sum_of_states([from_bytes(part) for part in parts])
        except Exception as error:  # told to all, then raised
            problem = error
        self.agree(what, problem)
        return found

    @contextmanager
    def met(self, what: str) -> Iterator[ShardRanks]:
        """Lets all ranks of the model come together for `what`, and yields them for the `with` block. Collective.

        An error in the block on ranks with one shard is raised on all ranks of the model. `what`: the purpose, for
        error messages.

        Raises:
            RuntimeError: inside a step, and where other ranks failed in the block.
            GroupError: where some ranks do something else, have left, or do not come in time.
        """
        with self._engine.at_barrier(what):
            self._replica.call(what, lambda group: group.barrier(what, self._engine.timeout_s))
            with self._telling(what):
                yield self

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Tells the other shards of an error in the block, or that there was none; raises where they had one."""
        try:
            yield
        except OtherShardError as error:
            raise RuntimeError(f"{what}: {error}") from None
        except Exception as error:
            if self._replica.failure is None:  # else all have heard of it
                self.within(what, said(error).encode(), is_failure=True)
            raise
        try:
            self.within(what, b"")
        except OtherShardError as error:
            self._engine.peers.stop(f"{what}: {error}; this rank has loaded its state, and goes no further")
