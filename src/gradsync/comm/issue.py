"""Issues the collectives of a training step, from one thread at a time and in the order that the plan fixes.

Where is the event loop? There is none. A scheme is a coroutine whose every `await` is on a `Pending`; the wait for one
`Pending` is one *stage* of the scheme. A `Synchronization` holds the order of a step's turns, (bucket, stage) pairs. At
a bucket's turn the issuing thread waits for the `Pending` that the bucket's coroutine awaits, resumes the coroutine up
to its next `await`, and goes on to the next turn while that operation is in flight. So operations of several buckets
overlap, yet every rank issues them in the same order whatever the timing: two threads on one communicator, or an order
decided by timing, would make ranks read each other's messages.

Who issues? The communication thread, as far as buckets are ready while backward goes on. The thread that calls `wait`
issues the rest itself: handing it over costs two thread switches, which matter in short steps. The lock `turn` admits
one thread at a time. `go_on` lets the communication thread issue the rest while the caller does something else, and
`wait_for` waits for one bucket. With a `CallingThread` there is no communication thread: the thread of backward issues
what is ready at once, in the order in which its gradients get ready and among the user's own collectives.

Who computes? The issuing thread runs a scheme's code between two awaits. `Work`, a computation that a scheme awaits,
names a device: `OFFLOAD` is a thread of its own, which begins at once; `COMPUTE` is the thread of backward, which does
the work when it next calls `do_work` or `wait`, and until then turns that need the work wait. The scheme of a
*prepared* bucket awaits `Work` before any operation: that begins when the bucket is ready, if it is for `COMPUTE` on
the thread that calls `mark_ready`.

On an accelerator all of a scheme's code runs on the communication stream, whichever thread issues it, and `COMPUTE`
on the stream of backward; the host computes what is offloaded. No thread but that for offloaded work waits for the
device: a bucket's first turn waits for the event recorded when its gradients were complete, `wait` and `wait_for` make
the stream of the caller wait for the results.

`torch.profiler` shows `gradsync::bucket 0 push`, the bucket's work at that turn, and `gradsync::bucket 0 wait for
push`, the wait for its operation. The profiler records the communication thread only with `profile_all_threads`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from ..costs.steps import COMPUTE, FINISH, OFFLOAD
from ..costs.timeline import Task
from ..devices.streams import COMMUNICATION, Event, Moment, NoStreams, Streams
from ..devices.trace import in_trace
from .errors import GroupError
from .group import Pending, waiting_at
from .threads import CallingThread, JobThread
from .work import Work

logger = logging.getLogger(__name__)

T = TypeVar("T")


def drive(coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """Runs a scheme's coroutine to its end and returns its result; waits up to `timeout_s` for each operation."""
    try:
        pending: Pending[Any] = coroutine.send(None)
        while True:
            pending = coroutine.send(pending.wait(timeout_s))
    except StopIteration as done:
        result: T = done.value
        return result


def drive_in_turns(
    coroutines: Sequence[Coroutine[Any, Any, T]],
    meanwhile: Callable[[], object] = lambda: None,
    clock: Callable[[], Moment] | None = None,
) -> tuple[list[T], list[float]]:
    """Runs one scheme coroutine per rank of a `LocalGroup` in one thread: each in turn up to its next operation.

    Args:
        coroutines: one for each rank.
        meanwhile: called before each pass over the ranks, and not timed.
        clock: tells the time; None: this thread's processor time.

    Returns:
        the coroutines' results, and the seconds before the first operation, between operations and after the last, as
            means over the ranks; local computations that schemes await (`Work`) are included.
    """
    clock = clock or NoStreams().work_moment
    results: dict[int, T] = {}
    arrived: list[Any] = [None] * len(coroutines)
    passes: list[tuple[Moment, Moment]] = []
    while len(results) < len(coroutines):
        pending: list[Pending[Any]] = []
        meanwhile()
        began = clock()
        for rank, (coroutine, value) in enumerate(zip(coroutines, arrived, strict=True)):
            try:
                pending.append(_until_operation(coroutine, value))
            except StopIteration as done:
                results[rank] = done.value
        passes.append((began, clock()))
        arrived = [each.wait(0.0) for each in pending]
    seconds = [ended.since(began) / len(coroutines) for began, ended in passes]
    return [results[rank] for rank in range(len(coroutines))], seconds


def _until_operation(coroutine: Coroutine[Any, Any, Any], value: Any) -> Pending[Any]:
    """Returns the coroutine's next collective, running computations (`Work`) before; StopIteration if none is left."""
    pending: Pending[Any] = coroutine.send(value)
    while isinstance(pending, Work):
        pending = coroutine.send(pending.wait(0.0))
    return pending


class Span(NamedTuple):
    """A piece of a step's work, such as a bucket's transfer, with the moments when a device began and ended it.

    Attributes:
        bucket: the id of the bucket.
        stage: the part of the scheme's exchange, such as "push".
        stream: what the work keeps busy: "link", "kernel", "compute" or "offload".
        began, ended: the moments on the device; `task` turns them into seconds.
        nbytes: the bytes that this rank sends on a link; 0 for other work.
    """

    bucket: str
    stage: str
    stream: str
    began: Moment
    ended: Moment
    nbytes: float = 0.0

    def task(self, origin: Moment) -> Task:
        """Returns this piece of work with its times in seconds since `origin`; waits until the device has ended it."""
        name = f"{self.bucket}:{self.stage}"
        return Task(name, self.stream, self.began.since(origin), self.ended.since(origin), self.nbytes)


class CancelledStepError(RuntimeError):
    """An error that a training step was cancelled before all of its buckets were ready, so that it has no results."""


class Synchronization:
    """The gradient synchronisation of one training step: runs a scheme's coroutine per bucket and keeps their results.

    Args:
        order: (bucket, stage) pairs in the order of issuing; a stage is one collective of a bucket's scheme.
        start: makes a bucket's coroutine, when its first collective is about to be issued.
        where: returns the words for a bucket and a stage in error messages.
        timeout_s: seconds that each operation may take.
        turn: the lock that a thread holds while it issues operations.
        thread: the communication thread, which issues operations during backward, or the thread that calls.
        early: whether operations of ready buckets are issued during backward.
        prepared: buckets whose coroutines await `Work`, a computation, before any collective.
        streams: the streams of the device that the gradients are on.
        offload: submits a job to the thread for offloaded work; None: the thread that waits for the work does it, or
            the one that prepares the bucket.
    """

    def __init__(
        self,
        order: Sequence[tuple[str, str]],
        start: Callable[[str], Coroutine[Any, Any, Any]],
        *,
        where: Callable[[str, str], str],
        timeout_s: float,
        turn: threading.Lock,
        thread: JobThread | CallingThread,
        early: bool = True,
        prepared: Collection[str] = (),
        streams: Streams | None = None,
        offload: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._order = order
        self._start = start
        self._where = where
        self._timeout_s = timeout_s
        self._turn = turn
        self._thread = thread
        self._early = early
        self._prepared = prepared
        self._offload = offload
        self._postponed: list[str] = []  # prepared buckets that are ready, if nothing is early
        self._works: list[Work[Any]] = []  # all work of this step
        self.due: deque[Work[Any]] = deque()  # work that waits for the thread of backward
        self._streams = streams or NoStreams()
        self._streams.release()
        self._buckets = {bucket for bucket, _ in order}
        self.ready: dict[str, Moment] = {}  # when each bucket's data was complete
        self._position = 0  # of the next turn in the order
        self._coroutines: dict[str, Coroutine[Any, Any, Any]] = {}
        self._pending: dict[str, tuple[Pending[Any], str, Moment]] = {}
        self._complete: dict[str, Event] = {}  # recorded when a bucket's gradients were complete
        self._issued: Event  # behind all that was issued so far
        self._cancelled = False
        self._ended = False
        self._error: BaseException | None = None
        self._handed_over = False  # by `go_on`: the thread issues the rest
        self._progress = threading.Condition()  # notified of results and of the end
        self._synchronized: dict[str, Event] = {}  # recorded behind each result
        self.results: dict[str, Any] = {}
        self.began = self._streams.moment()
        self.spans: list[Span] = []

    def mark_ready(self, bucket: str) -> None:
        """Marks the bucket's gradients as complete, so that its operations may begin; called in backward's thread."""
        ready = self._streams.moment()
        if bucket in self._prepared and self._early:
            self._prepare(bucket)
        elif bucket in self._prepared:
            self._postponed.append(bucket)
        self._complete[bucket] = self._streams.record()
        self.ready[bucket] = ready
        if len(self.ready) == len(self._buckets):
            return  # all buckets are ready: `wait` is about to be called
        position = self._position
        if self._early and position < len(self._order) and self._order[position][0] in self.ready:
            self._thread.submit(self.advance)

    def do_work(self) -> None:
        """Runs computations (`Work`) that schemes queued for the thread of backward; only that thread calls this."""
        while self.due and not self._cancelled:
            self.due.popleft().run()
            self._thread.submit(self.advance)

    def cancel(self) -> None:
        """Cancels the step unless it has ended: no further operation is issued, `wait` raises `CancelledStepError`."""
        self._cancelled = True
        self._give_up_work()
        self._tell_progress()

    def go_on(self) -> None:
        """Makes the communication thread issue all remaining operations; does not block. All buckets must be ready."""
        self._handed_over = True
        self._thread.submit(self.advance)

    def wait_for(self, bucket: str) -> None:
        """Blocks until this bucket is synchronised, or raises the step's error; `go_on` must have been called."""
        assert self._handed_over
        with self._progress:
            self._progress.wait_for(lambda: bucket in self.results or self._ended or self._cancelled)
        if bucket not in self.results:
            self.wait()
        self._synchronized[bucket].wait()

    def wait(self) -> None:
        """Issues all remaining operations and blocks until every bucket is synchronised; raises the step's error."""
        while self._postponed and not self._cancelled:
            self._prepare(self._postponed.pop(0))
        self.advance(joined=True)
        if not self._ended:
            raise CancelledStepError("the step was given up before all of its buckets were ready")
        self._issued.wait()
        if self._error is not None:
            raise self._error

    def advance(self, *, joined: bool = False) -> None:
        """Issues operations in the plan's order up to the first bucket that is not ready, or to the end if all are.

        The communication thread calls this during backward, the thread of backward when it waits.

        `joined`: the caller is the thread of backward, and backward has ended: so it also runs computations (`Work`)
        that schemes left to this thread.
        """
        with self._turn, torch.no_grad(), self._streams.on(COMMUNICATION):
            if self._ended or self._cancelled:
                return
            try:
                self._ended = self._run_turns(joined=joined)
            except BaseException as error:  # handed to the thread that waits
                self._error, self._ended = error, True
                self._give_up_work()
            self._issued = self._streams.record()
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self._handed_over:
            with self._progress:
                self._progress.notify_all()

    def _run_turns(self, *, joined: bool) -> bool:
        """Issues operations in order as far as buckets are ready; returns whether all of the step have ended.

        `joined`: the caller is the thread of backward, so it also runs the computations (`Work`) left to this thread.
        """
        while self._position < len(self._order):
            bucket, stage = self._order[self._position]
            if bucket not in self.ready or self._cancelled or (not joined and self._waits_for_backward(bucket)):
                return False
            self._complete[bucket].wait()
            if bucket not in self._coroutines:
                self._coroutines[bucket] = self._start(bucket)
                self._resume(bucket, stage)
            elif bucket in self._pending:  # a bucket may have fewer stages than planned, as in a group of one
                self._resume(bucket, stage)
            self._position += 1
        # Operations still in flight, and stages beyond the planned ones, end in bucket order on every rank.
        for bucket in dict.fromkeys(bucket for bucket, _ in self._order):
            while bucket in self._pending:
                if not joined and self._waits_for_backward(bucket):
                    return False
                self._resume(bucket, FINISH)
        return True

    def _waits_for_backward(self, bucket: str) -> bool:
        """Whether the bucket awaits a computation that is left to the thread of backward and has not ended."""
        operation = self._pending[bucket][0] if bucket in self._pending else None
        return isinstance(operation, Work) and operation.device == COMPUTE and not operation.ended

    def _prepare(self, bucket: str) -> None:
        """Starts the coroutine of a bucket that begins with a computation, and submits this to `offload` or runs it."""
        complete = self._streams.record()
        with torch.no_grad(), self._streams.on(COMMUNICATION):
            complete.wait()
            coroutine = self._coroutines[bucket] = self._start(bucket)
            try:
                work = coroutine.send(None)
            except BaseException as error:  # raised at the bucket's first turn
                work = _failed(error)
            assert isinstance(work, Work), f"bucket {bucket!r} is prepared, and awaits something else than work first"
            self._pending[bucket] = (work, work.name, self.began)
            handed_over = self._hand_over(work)
        if not handed_over:
            work.run()

    def _hand_over(self, work: Work[Any]) -> bool:
        """Submits work for `OFFLOAD` to the offload thread, if there is one; returns whether it did."""
        self._works.append(work)
        if self._cancelled:
            work.give_up()
        work.follow(self._streams)
        if work.device != OFFLOAD or self._offload is None:
            return False
        work.submit_to(self._offload)
        return True

    def _give_up_work(self) -> None:
        for work in list(self._works):
            work.give_up()

    def _resume(self, bucket: str, stage: str) -> None:
        value, resumed = None, None
        current = stage
        try:
            if bucket in self._pending:
                operation, current, issued = self._pending.pop(bucket)
                place = partial(self._where, bucket, current)
                with waiting_at(place), in_trace(f"gradsync::bucket {bucket} wait for {current}"):
                    value = operation.wait(self._timeout_s)
                if isinstance(operation, Work):
                    self.spans.append(Span(bucket, current, operation.device, operation.began, operation.finished))
                else:
                    resumed = self._streams.moment()
                    self.spans.append(Span(bucket, current, "link", issued, resumed, operation.sent_bytes))
                current = stage
            if resumed is None:
                resumed = self._streams.moment()
            try:
                with in_trace(f"gradsync::bucket {bucket} {stage}"):
                    operation = self._coroutines[bucket].send(value)
            except StopIteration as done:
                self.spans.append(Span(bucket, FINISH, "kernel", resumed, self._streams.moment()))
                self._synchronized[bucket] = self._streams.record()
                self.results[bucket] = done.value
                self._tell_progress()
                return
            issued = self._streams.moment()
            self.spans.append(Span(bucket, stage, "kernel", resumed, issued))
            self._pending[bucket] = (operation, stage, issued)
            if isinstance(operation, Work) and not self._hand_over(operation) and operation.device == COMPUTE:
                self.due.append(operation)
        except GroupError as error:
            raise error.at(self._where(bucket, current)) from None
        except Exception as error:
            error.add_note(f"while synchronising {self._where(bucket, current)}")
            raise


def _failed(error: BaseException) -> Work[Any]:
    """Returns a computation (`Work`) that raises this error where it is awaited."""

    def fail() -> None:
        raise error

    return Work(fail, COMPUTE, "begin")
