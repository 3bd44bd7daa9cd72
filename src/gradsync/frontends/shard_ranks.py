"""All ranks of a model in shards, which meet to load or gather state: nothing is loaded unless all can load.

Ranks with the same shard, one of each replica, are an engine's group. Here these groups meet, within each replica.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ..comm import Group, GroupError, LocalGroup, gather_bytes
from ..engine.engine import Engine
from ..engine.peers import said
from ..state import Shard, added, from_bytes, moved, to_bytes
from .agreement import announcing, group_of
from .arguments import Communicator
from .fsdp_internals import Mesh


class OtherShardError(RuntimeError):
    """An error: ranks with another shard have failed, and have said why."""


class ShardRanks:
    """All ranks of a model in shards, between two steps, for a call that all of them make: `met` yields this object.

    They are counted replica by replica. Ranks of a replica meet in one way only, `within`, each time with the same
    collectives. So a rank that fails can tell it there, whatever the others want to do.

    Args:
        engine: exchanges between the replicas.
        replica: the ranks of this rank's replica, by shard.
    """

    def __init__(self, engine: Engine, replica: Group) -> None:
        self._engine, self._replica = engine, replica

    @property
    def rank(self) -> int:
        """This rank's number among all ranks of the model, from 0."""
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
        of_shards = [self._engine.peers.gather(what, part) for part in self.within(mine)]
        return [part for of_replica in zip(*of_shards, strict=True) for part in of_replica]

    def within(self, mine: bytes, *, is_failure: bool = False) -> list[bytes]:
        """Sends bytes to the ranks of this rank's replica; returns theirs, by shard. Collective.

        Args:
            mine: the bytes.
            is_failure: whether this rank has failed, and `mine` is the text of its error.

        Raises:
            OtherShardError: unless `is_failure`, where another rank has failed.
            GroupError: where a rank of the replica was lost or does something else.
        """
        parts = gather_bytes(self._replica, bytes([is_failure]) + mine, self._engine.timeout_s)
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
        found: list[dict[str, Any]] = []
        for shard, target in enumerate(self.within(json.dumps(mine.entry()).encode())):
            pieces: dict[str, Tensor] = {}
            try:
                pieces = moved(states, Shard.of(json.loads(target)))
            except Exception as error:  # told to all, then raised
                problem = error
            parts = self.within(to_bytes(pieces))
            if shard == self._replica.rank:
                found = [from_bytes(part) for part in parts]
        self.agree(what, problem)
        return added(found)

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Tells the other shards of an error in the block, or that there was none; raises where they had one."""
        try:
            yield
        except OtherShardError as error:
            raise RuntimeError(f"{what}: {error}") from None
        except GroupError:  # `announcing` tells it
            raise
        except Exception as error:
            self.within(said(error).encode(), is_failure=True)
            raise
        try:
            self.within(b"")
        except OtherShardError as error:
            self._engine.peers.stop(f"{what}: {error}; this rank has loaded its state, and goes no further")
        except GroupError as error:
            self._engine.peers.fail(error)
            raise


@contextmanager
def met(engine: Engine, mesh: Mesh, what: str) -> Iterator[ShardRanks]:
    """Lets all ranks of a model in shards come together for `what`, and yields them for the `with` block. Collective.

    An error in the block on ranks with one shard is raised on all ranks of the model.

    Args:
        engine: averages this rank's shard between replicas.
        mesh: the mesh of the model.
        what: the purpose, for error messages.

    Raises:
        RuntimeError: inside a step, and where other ranks failed in the block.
        GroupError: where some ranks do something else, have left, or do not come in time.
    """
    communicator: Communicator = "own" if engine.device.type == "cpu" else "shared"
    with engine.at_barrier(what), ExitStack() as stack:
        if mesh.shard_group is None:  # one shard, as of `replicate`
            replica: Group = LocalGroup.world(1)[0]
        else:
            replica = group_of(mesh.shard_group, engine.timeout_s, what, engine.device, communicator)
            stack.callback(replica.close)
        ranks = ShardRanks(engine, replica)
        with announcing(replica, what), ranks._telling(what):
            yield ranks
