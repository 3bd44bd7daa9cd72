"""The other ranks, as an engine talks to them between its steps and beside the exchange of gradients.

Whatever ranks tell each other besides gradients goes through `Peers`: one at a time, with errors that name what it was
for and the step. Where one rank fails, all synchronisation stops, and the other ranks are told why.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch

from ..comm import CallingThread, Group, GroupError, JobThread, gather_bytes, inert_in_children, waiting_at
from ..devices.streams import COMMUNICATION, Streams

T = TypeVar("T")

DETACHED = "gradsync was detached from this model; attach again on every rank"
FORKED = "this process was forked from a rank, whose connections are not its own: only the rank itself synchronises"


class Peers:
    """The way to a group's ranks: runs collectives between and beside the steps, and stops all when a rank fails.

    Args:
        group: the ranks.
        device: where gradients are; the communication thread works on it.
        streams: those of the device.
        timeout_s: seconds to wait for the other ranks.
        step: returns the number of the training step, which errors name.

    Attributes:
        turn: a lock, held by the thread that uses the group.
        thread: the communication thread, which issues the operations of steps.
        failure: why all synchronisation has stopped; None: it has not.
        beside: another group of which this rank is a member, where synchronisation stops when it stops here.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        streams: Streams,
        *,
        timeout_s: float,
        step: Callable[[], int],
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.turn = threading.Lock()
        self.failure: RuntimeError | None = None
        self.beside: Peers | None = None
        self.thread: CallingThread | JobThread = CallingThread()
        self.is_closed = False
        self._device = device
        self._streams = streams
        self._step = step
        self._asides: list[Future[Any]] = []  # what the communication thread does before the exchange
        self._closed = DETACHED  # the error text once `is_closed`
        inert_in_children(self)

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self.group.size

    def start(self) -> None:
        """Starts the communication thread; there is none for groups whose operations the calling thread must issue."""
        if not self.group.on_calling_thread:
            self.thread = JobThread("gradsync", self._device, owner=self)

    def close(self) -> None:
        """Ends the communication thread and closes the group; no rank can be reached any more."""
        self.is_closed = True
        self.thread.stop()
        self.group.close()

    def forked(self) -> None:
        """Closes this copy of the rank's object, as this process was forked from the rank's; the rank's stays open."""
        self.is_closed, self._closed = True, FORKED
        self.thread = CallingThread()

    def call(self, what: str, function: Callable[[Group], Any], *, step: int | None = None) -> Any:
        """Returns `function(group)`, called while no other thread uses the group; `what` names the operation in errors.

        `step`: the number of the training step that errors name; None: the present one's.

        Raises:
            GroupError: when another rank died, stopped answering or failed, naming `what` and the step.
            RuntimeError: if synchronisation has stopped or was closed before.
        """
        self.require_working()
        place = f"{what}, step {self._step() if step is None else step}"
        try:
            with self.turn, waiting_at(lambda: place):
                return function(self.group)
        except GroupError as error:
            placed = error.at(place)
            self.fail(placed)
            raise placed from None
        except BaseException as error:  # an interruption leaves the others in the middle of it, too
            self.fail(f"{place}: {said(error)}")
            raise

    def aside(self, job: Callable[[Group], T]) -> Future[T]:
        """Runs `job(group)` on the communication thread, ahead of the gradients' exchange in the step under way.

        Nothing else uses the group meanwhile, so all ranks must pass a job with the same collectives. They must pass it
        before any gradient of the step is loaded. Where a step listener delays the exchange to the end of backward,
        they may pass it later. `Engine.finish` waits for the job, and raises its errors.
        """
        done: Future[T] = Future()
        begun = self._streams.record()

        def run() -> None:
            try:
                with self.turn, torch.no_grad(), self._streams.on(COMMUNICATION):
                    begun.wait()
                    done.set_result(job(self.group))
            except BaseException as error:  # raised again where the result is asked for
                done.set_exception(error)

        self._asides.append(done)
        self.thread.submit(run)
        return done

    def begin_step(self) -> None:
        """Begins a training step: forgets the jobs that were passed to `aside` in the step before."""
        self._asides = []

    def end_asides(self) -> None:
        """Waits for the jobs that were passed to `aside` in the step under way, and raises their errors."""
        for aside in self._asides:
            aside.result()

    def agree(self, what: str, problem: Exception | None, alike: str = "") -> None:
        """Raises on every rank if some rank has a `problem`, or if `alike` differs between ranks. Collective.

        A rank raises its own problem or, without one, a RuntimeError with that of the first rank that has one. The
        engine can go on afterwards.

        Args:
            what: names the operation, for messages.
            problem: this rank's error; None: none.
            alike: a text that must be equal on all ranks, which raise ValueError otherwise.
        """
        text = "" if problem is None else str(problem) or repr(problem)
        told = self.gather(what, f"{alike}\0{text}".encode())
        if problem is not None:
            raise problem
        parts = [theirs.decode().partition("\0") for theirs in told]
        for rank, (_, _, theirs) in enumerate(parts):
            if theirs:
                raise RuntimeError(f"{what}: rank {rank} could not: {theirs}")
        if len({theirs for theirs, _, _ in parts}) > 1:
            by_rank = ", ".join(f"{theirs} on rank {rank}" for rank, (theirs, _, _) in enumerate(parts))
            raise ValueError(f"{what}: the ranks differ: {by_rank}")

    def tell(self, what: str, mine: Any) -> list[Any]:
        """Sends the JSON value `mine` to all ranks; returns all ranks' values, by rank. `what` names this in errors."""
        return [json.loads(part) for part in self.gather(what, json.dumps(mine).encode())]

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        """Sends bytes, at least one, to all ranks; returns all ranks' bytes, by rank. `what` names this in errors."""
        parts: list[bytes] = self.call(what, lambda group: gather_bytes(group, mine, self.timeout_s))
        return parts

    def fail(self, why: str | BaseException) -> None:
        """Stops all synchronisation from now on, and tells the other ranks why; a second call does nothing.

        `why`: a text or an error; a GroupError also names the ranks that were lost.
        """
        if self.failure is None:
            text = why if isinstance(why, str) else said(why)
            ranks = why.ranks if isinstance(why, GroupError) else None
            self.failure = RuntimeError(text) if ranks is None else GroupError(text, ranks)
            if not self.is_closed:
                self.group.announce_failure(text, ranks)
            if self.beside is not None:
                self.beside.fail(why)

    def stop(self, why: str) -> NoReturn:
        """Stops all synchronisation as `fail` does, and raises RuntimeError with the same text."""
        self.fail(why)
        raise RuntimeError(why)

    @contextmanager
    def told_of_refusals(self) -> Iterator[None]:
        """Stops all synchronisation at a ValueError in the block, as settings may differ by rank: others would wait."""
        try:
            yield
        except ValueError as error:
            self.fail(error)
            raise

    def failed_alike(self, error: RuntimeError) -> None:
        """Stops all synchronisation for an error that all ranks raise alike, so that none needs to be told."""
        self.failure = self.failure or error

    def require_working(self) -> None:
        """Checks that synchronisation has neither stopped after a failure nor been closed.

        Raises:
            GroupError: if it stopped because ranks were lost.
            RuntimeError: if it stopped for another reason, or was closed.
        """
        if self.is_closed:
            raise RuntimeError(self._closed)
        if self.failure is not None:
            why = f"gradient synchronisation stopped earlier: {self.failure}; detach() and attach again on every rank"
            if isinstance(self.failure, GroupError):
                raise GroupError(why, self.failure.ranks)
            raise RuntimeError(why)


def said(error: BaseException) -> str:
    """Returns the error's text, or its class name where there is none, as for KeyboardInterrupt."""
    return str(error) or type(error).__name__
