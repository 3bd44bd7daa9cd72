"""`StreamModel`: CPU tensors as if on an accelerator, where each access must be ordered behind the accesses before it.

The real engine runs on CPU tensors, and pretends to submit each operation to the thread's current stream. The model
notes which memory each operation reads and writes, and keeps a vector clock for each stream: how far into every stream
it is ordered behind others, by events alone, never by what threads happen to do. Two accesses of one memory, of which
one writes, that no event orders raise `UnorderedAccessError`; so does memory that its stream could lend out anew
while another stream still uses it. torch's own sanitizer for CUDA works so.

A dispatch mode sees what its own thread does, and no native kernel: each thread that works enters the mode, and kernels
run their definitions in torch (`kernels.use("reference")`).

The pretended device has a clock of its own: operations and transfers take seconds by their bytes, whatever the host's
clock says, and a stream begins an operation once it has ended the one before and a host has submitted it.

Memory to which offloaded work was copied is the host's. What works on it is computed on the thread itself, at once: it
needs a thread that has waited for the copy, and what the thread submits afterwards runs behind it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradsync import kernels
from gradsync.comm import Group, LocalGroup, Pending, StreamGroup
from gradsync.comm.backends import GROUP_OF_BACKEND
from gradsync.devices import host, streams
from gradsync.devices.streams import Event, HostCopy, Moment, StreamName, Streams, _Here
from gradsync.schemes import Route
from gradsync.schemes.transit import is_on_host
from gradsync.schemes.tree import Kind
from gradsync.tuning import rehearsal

host_fetch = host.fetch

T = TypeVar("T")

CALL_S, BYTE_S = 5e-6, 1e-11  # of an operation, and of a byte that it reads or writes
MESSAGE_S, LINK_BYTE_S = 20e-6, 1e-9  # of a collective, and of a byte that a member gives to it

Stream = tuple[Any, ...]  # a name
Clock = dict[Stream, int]  # up to which operation of each stream


class UnorderedAccessError(AssertionError):
    """Raised where no event orders two accesses of one memory, of which one writes."""


@dataclass
class Memory:
    """The accesses of one tensor's memory: the operation's number on its stream, and where in the code it was."""

    of: Stream  # to which it returns
    written: tuple[Stream, int, str] | None = None
    read: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    shared: set[Stream] = field(default_factory=set)  # behind which it returns
    watched: bool = True
    place: str = ""  # "host" or "device"; "": not known before the first operation with other memory

    def uses(self) -> Iterator[tuple[Stream, int, str]]:
        if self.written is not None:
            yield self.written
        for stream, (number, where) in self.read.items():
            yield stream, number, where


class StreamModel:
    """The pretended accelerator; all ranks of a test share it, each with streams of its own.

    `without`: the function whose events (or kept objects) are left out, to prove that they are needed.
    """

    def __init__(self, without: str = "") -> None:
        self.without = without
        self.left_out = 0  # events
        self._lock = threading.RLock()
        self._clocks: dict[Stream, Clock] = {}
        self._memory: dict[int, tuple[weakref.ref[Any], Memory]] = {}  # by the address of the storage
        self._freed: dict[Stream, list[Memory]] = {}
        self._settled: Clock = {}  # up to where hosts have waited for streams
        self._free_s: dict[Stream, float] = {}  # when each stream has ended what it was given, by the device's clock
        self._here = threading.local()
        # Where hosts waited for a stream: ("thread", ...) is the user's own, which backward runs on.
        self.host_reads: list[tuple[str, str]] = []

    @property
    def current(self) -> Stream:
        """The thread's current stream; outside of any context of `on` a stream that only this thread has."""
        stack: list[Stream] = getattr(self._here, "stack", [])
        return stack[-1] if stack else ("thread", threading.get_ident())

    @contextmanager
    def on(self, stream: Stream | None = None) -> Iterator[None]:
        """Makes a stream this thread's current one (None: leaves it), and watches the thread meanwhile."""
        self._here.stack = stack = getattr(self._here, "stack", [])
        is_first = not getattr(self._here, "watched", False)
        if stream is not None:
            stack.append(stream)
        with ExitStack() as within:
            if is_first:
                self._here.watched = True
                within.callback(setattr, self._here, "watched", False)
                within.enter_context(_Watch(self))
                within.enter_context(_Meter(self))
            try:
                yield
            finally:
                if stream is not None:
                    stack.pop()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes the place of the streams of all devices; checks of what the device holds wait for nothing."""
        with (
            patch.object(streams, "streams_of", lambda device: ModelStreams(self)),
            patch.object(streams, "settle", self._settle),
            patch.object(streams, "require", lambda holds, expected, got: None),
            patch.object(host, "is_apart", lambda device: True),
            patch.object(host, "_pinned", self._pinned),
            patch.object(host, "fetch", self._copying(host.fetch)),
            patch.object(host, "send", self._copying(host.send)),
            patch.object(Route, "init", self._on_host(Route.init)),
        ):
            yield

    def _copying(self, function: Callable[..., T]) -> Callable[..., T]:
        """Returns the function, whose operations run on the thread's current stream also with memory of the host."""

        def copies(*args: Any) -> T:
            if function is host_fetch:
                self.note_host_read("fetch")
            self._here.copying = True
            try:
                return function(*args)
            finally:
                self._here.copying = False

        return copies

    def _pinned(self, like: Tensor) -> Tensor:
        made = torch.empty_like(like)
        self._of(made).place = "host"
        return made

    def _on_host(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a route's `init`, whose states of offloaded work are memory of the host."""

        def made(route: Route, bucket: Any, group: Any) -> Any:
            state = init(route, bucket, group)
            compressing = [task for task in route.leaf if task.kind is Kind.COMP]
            offloaded = [is_on_host(task, route.compressor_at(number)) for number, task in enumerate(compressing)]
            for (_, parts), away in zip(list(state.items())[1:], offloaded, strict=False):
                for part in parts if away else ():
                    for tensor in part.elements.values():
                        self._of(tensor).place = "host"
            return state

        return made

    @property
    def host(self) -> Stream:
        """The thread itself, which works on memory of the host."""
        return ("host", threading.get_ident())

    def place_of(self, tensors: list[Tensor]) -> str:
        """Returns where an operation on these tensors is computed, and notes that memory of no place is there too."""
        with self._lock:
            found = [self._of(tensor) for tensor in tensors]
            places = {memory.place for memory in found}
            if getattr(self._here, "copying", False):
                where = "device"
            elif {"host", "device"} <= places:
                raise UnorderedAccessError("memory of the host meets the device's in one operation, without an event")
            else:
                where = max(places, default="")  # "host" before "device" before ""
            for memory in found:
                if not memory.place and where == "host":  # the thread made it, whatever its current stream was
                    memory.written, memory.read = None, {}
                memory.place = memory.place or where
            return where

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """Leaves out of `host_reads` what this thread reads meanwhile."""
        before, self._here.unmetered = getattr(self._here, "unmetered", False), True
        try:
            yield
        finally:
            self._here.unmetered = before

    @contextmanager
    def elsewhere(self, place: str) -> Iterator[None]:
        """Lets what this thread reads meanwhile count as read there; reads in tests are left out."""
        self._here.place = place
        try:
            yield
        finally:
            self._here.place = None

    def took(self, seconds: float) -> None:
        """Lets the current stream work so long, once it has ended what it has and this thread has submitted this."""
        with self._lock:
            self._free_s[self.current] = self.free_s() + seconds

    def free_s(self) -> float:
        """Returns when the current stream can begin what this thread submits now."""
        return max(self._free_s.get(self.current, 0.0), getattr(self._here, "host_s", 0.0))

    def idle_until(self, at_s: float) -> None:
        """Lets the current stream do nothing before this time of the device."""
        with self._lock:
            self._free_s[self.current] = max(self._free_s.get(self.current, 0.0), at_s)

    def host_waits_until(self, at_s: float) -> None:
        """Lets this thread submit nothing before this time of the device."""
        self._here.host_s = max(getattr(self._here, "host_s", 0.0), at_s)

    def has_passed(self, at_s: float) -> bool:
        """Whether this thread has waited until then."""
        return at_s <= getattr(self._here, "host_s", 0.0)

    def note_host_read(self, what: str) -> None:
        self.host_waits_until(self.free_s())
        place = getattr(self._here, "place", None) or _place()
        if not getattr(self._here, "unmetered", False) and not place.startswith(("test_", "reference/")):
            self.host_reads.append((str(self.current[0]), f"{what} in {place}"))

    def _settle(self, device: torch.device) -> None:
        """Orders what comes after it, on any stream, behind the current stream."""
        if self.without == f"{_caller()} settles":
            self.left_out += 1
            return
        self.host_waits_until(self.free_s())
        with self._lock:
            if getattr(self._here, "copying", False):
                self.learn(self.snapshot())
            else:  # what is cached: whoever finds it there comes behind this thread
                self._settled = merged(self._settled, self.snapshot())

    def snapshot(self) -> Clock:
        """Returns how far the current stream is, behind all that this thread has waited for."""
        with self._lock:
            self._clocks[self.current] = merged(self._clocks.get(self.current, {}), self.known)
            return dict(self._clocks[self.current])

    @property
    def known(self) -> Clock:
        """How far this thread knows all streams to be: those that it has waited for, and its own work."""
        return self._clocks.get(self.host, {})

    def order_behind(self, clock: Clock) -> None:
        """Orders what the current stream does from now on behind this point of other streams."""
        with self._lock:
            self._clocks[self.current] = merged(self._clocks.get(self.current, {}), clock)

    def learn(self, known: Clock) -> None:
        """Lets this thread know what another one knew when it told it something."""
        with self._lock:
            self._clocks[self.host] = merged(self.known, known)

    def read(self, tensor: Tensor, what: str) -> None:
        with self._lock:
            memory, clock = self._of(tensor), self.snapshot()
            if not memory.watched:
                return
            self._require_order(memory.written, clock, f"{what} reads what", "wrote")
            memory.read[self.current] = self._tick(), what

    def write(self, tensor: Tensor, what: str) -> None:
        with self._lock:
            memory, clock = self._of(tensor), self.snapshot()
            if not memory.watched:
                return
            for use in list(memory.uses()):
                self._require_order(use, clock, f"{what} overwrites what", "used")
            memory.written, memory.read = (self.current, self._tick(), what), {}

    def made(self, tensor: Tensor, what: str, place: str = "device") -> None:
        """Records a new tensor, in memory of the current stream that may have been another tensor's."""
        with self._lock:
            stream = self.current
            clock = self.snapshot()
            for memory in self._freed.pop(stream, []):
                for use in memory.uses() if memory.watched else ():
                    if use[0] not in memory.shared:
                        self._require_order(use, clock, f"{what} may take memory that was freed, which", "used")
            self.write(tensor, what)
            self._of(tensor).place = place

    def share(self, tensor: Tensor) -> None:
        """Lets the tensor's memory be taken anew behind what the current stream is given until the tensor is gone."""
        with self._lock:
            self._of(tensor).shared.add(self.current)

    def forget(self, what: object) -> None:
        """Leaves the tensors in `what` out from now on: they are on the network, between ranks."""
        with self._lock:
            for tensor in _dense(what):
                self._of(tensor).watched = False

    def _tick(self) -> int:
        clock = self._clocks.setdefault(self.current, {})
        clock[self.current] = clock.get(self.current, 0) + 1
        return clock[self.current]

    def _require_order(self, use: tuple[Stream, int, str] | None, clock: Clock, what: str, did: str) -> None:
        if use is None or use[0] == self.current:
            return
        if max(clock.get(use[0], 0), self._settled.get(use[0], 0)) < use[1]:
            raise UnorderedAccessError(f"on {self.current}: {what} {use[2]} {did} on {use[0]}, without an event")

    def _of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._memory:
            gone = weakref.ref(storage, lambda _: self._free(address))
            self._memory[address] = gone, Memory(self.current)
        return self._memory[address][1]

    def _free(self, address: int) -> None:
        _, memory = self._memory.pop(address)
        if memory.place != "host":  # torch keeps pinned memory until copies of it have ended
            self._freed.setdefault(memory.of, []).append(memory)


def merged(one: Clock, other: Clock) -> Clock:
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in one.keys() | other.keys()}


class ModelStreams(Streams):
    """The streams that an engine has of the model."""

    def __init__(self, model: StreamModel) -> None:
        self._model = model
        self._kept: list[object] = []

    def on(self, name: StreamName) -> AbstractContextManager[object]:
        return self._model.on((name, id(self)))

    def record(self) -> Event:
        model = self._model
        if model.without == _caller():
            model.left_out += 1
            return ModelEvent(model, {}, 0.0)
        return ModelEvent(model, model.snapshot(), model.free_s())

    def moment(self) -> Moment:
        return ModelMoment(self._model, self._model.free_s())

    def to_host(self, tensor: Tensor) -> HostCopy:
        with self._model.unmetered():
            return ModelCopy(tensor)

    def share(self, tensor: Tensor) -> None:
        self._model.share(tensor)

    def keep(self, *objects: object) -> None:
        if self._model.without == f"{_caller()} keeps":
            self._model.left_out += 1
        else:
            self._kept += objects

    def release(self) -> None:
        self._kept = []


def _caller() -> str:
    return sys._getframe(2).f_code.co_qualname


class ModelCopy(_Here):
    """A copy that is under way until somebody asks for it."""

    has_arrived = False


class ModelEvent:
    def __init__(self, model: StreamModel, clock: Clock, at_s: float) -> None:
        self._model, self._clock, self._at_s = model, clock, at_s
        self._known = dict(model.known)

    def wait(self) -> None:
        if self._model.without == f"{_caller()} waits":
            self._model.left_out += 1
            return
        self._model.order_behind(self._clock)
        self._model.learn(self._known)  # threads hand events on
        self._model.idle_until(self._at_s)


class ModelMoment:
    """A time by the clock of the pretended device, which gets there once somebody has looked."""

    def __init__(self, model: StreamModel, at_s: float) -> None:
        self._model, self._at_s = model, at_s
        self._looked = False

    @property
    def has_passed(self) -> bool:
        passed = self._looked or self._model.has_passed(self._at_s)
        self._looked = True
        return passed

    def since(self, earlier: ModelMoment) -> float:
        self._model.host_waits_until(max(self._at_s, earlier._at_s))
        return self._at_s - earlier._at_s


_numbers = count()


class Asynchronous(Group):
    """A group like NCCL's: an operation runs on a stream of its own, and waiting orders only the waiter's stream."""

    _model: StreamModel

    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        return self._asynchronous(super().all_reduce(buffer), buffer)

    def all_gather(self, buffer: Tensor, sizes: Any = None) -> Pending[list[Tensor]]:
        return self._asynchronous(super().all_gather(buffer, sizes), buffer)

    def all_to_all(self, buffer: Tensor, sent: Any, received: Any, *, largest: Any = None) -> Pending[list[Tensor]]:
        return self._asynchronous(super().all_to_all(buffer, sent, received, largest=largest), buffer)

    def exchange(self, messages: Any, bounds: Any) -> Pending[list[Tensor]]:
        return self._asynchronous(super().exchange(messages, bounds), *messages)

    def swap(self, outgoing: Any, origins: Any, bound: int, device: Any, *, in_pairs: bool = False) -> Any:
        swapping = super().swap(outgoing, origins, bound, device, in_pairs=in_pairs)
        return self._asynchronous(swapping, *outgoing.values())

    def broadcast(self, buffer: Tensor) -> Pending[Tensor]:
        return self._asynchronous(super().broadcast(buffer), buffer)

    def _asynchronous(self, pending: Pending[T], *given: Tensor) -> Pending[T]:
        """Lets the operation read its inputs at any time between the issue and the wait, for which they are kept."""
        inputs = list(given)
        model, issued, issued_s = self._model, self._model.snapshot(), self._model.free_s()
        with model.on(("collective", next(_numbers))):
            model.order_behind(issued)
            model.idle_until(issued_s)
            for tensor in _dense(inputs):
                model.read(tensor, "a collective")
            model.took(MESSAGE_S + LINK_BYTE_S * sum(tensor.nbytes for tensor in _dense(inputs)))
            ended, ended_s = model.snapshot(), model.free_s()

        def wait(timeout_s: float) -> T:
            model.order_behind(ended)
            model.idle_until(ended_s)
            result = pending.wait(timeout_s)
            inputs.clear()
            return result

        return Pending(wait)


class ModelGroup(Asynchronous, LocalGroup):
    """A group of ranks as threads, all of one model: what a rank receives is ordered behind what its sender did."""

    def __init__(self, model: StreamModel, group: LocalGroup) -> None:
        super().__init__(group.rank, group._meeting, group.members, group.placement)
        self._model = model
        self._made: dict[tuple[int, ...], ModelGroup] = {}

    def subgroup(self, places: tuple[int, ...]) -> Any:
        made = super().subgroup(places)
        if made is self or not isinstance(made, LocalGroup):
            return made
        if places not in self._made:
            self._made[places] = ModelGroup(self._model, made)
        return self._made[places]

    def _operation(self, name: str, what: Any, result: Callable[[list[Any]], T]) -> Pending[T]:
        model = self._model
        model.forget(what)
        issued = super()._operation(name, (what, model.snapshot()), lambda brought: brought)

        def wait(timeout_s: float) -> T:
            brought = issued.wait(timeout_s)
            for _, clock in brought:
                model.order_behind(clock)
            return result([each for each, _ in brought])

        return Pending(wait)


class ModelTorchGroup(Asynchronous, StreamGroup):
    """A group of ranks as processes, each with a model of its own: a test sets `_model` of this class."""


@contextmanager
def on_a_pretended_accelerator(without: str = "") -> Iterator[StreamModel]:
    """Lets a rank, which is this process, work on a model inside: its device, its collectives and this thread."""
    model = StreamModel(without)
    ModelTorchGroup._model = model
    with ExitStack() as within:
        within.enter_context(kernels.use("reference"))
        within.enter_context(patch.dict(GROUP_OF_BACKEND, {"gloo": ModelTorchGroup}))
        within.enter_context(patch.object(rehearsal, "TABLES", ((2000, 8, 60), (200, 16, 20))))  # the host is slow
        within.enter_context(patch.object(rehearsal, "BUCKETS", ((1 << 12, 0.05), (1 << 10, 0.05))))
        within.enter_context(model.installed())
        within.enter_context(model.on())
        yield model


class _Watch(TorchDispatchMode):
    """Notes the memory that each torch operation of this thread reads, writes and makes."""

    def __init__(self, model: StreamModel) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = function._schema
        returned = [value.alias_info for value in schema.returns]
        what = f"{function.overloadpacket.__name__} in {_place()}"
        by_mask = function.overloadpacket.__name__ in BY_INDEX and any(
            isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1]
        )
        repeats = function.overloadpacket.__name__ == "repeat_interleave" and kwargs.get("output_size") is None
        if by_mask or repeats or function.overloadpacket.__name__ in HOST_READS:
            self._model.note_host_read(function.overloadpacket.__name__)
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if is_view:
            return function(*args, **kwargs)
        names = (each.name for each in schema.arguments)
        given = {name: _dense(value) for name, value in (*zip(names, args, strict=False), *kwargs.items())}
        place = self._model.place_of([tensor for tensors in given.values() for tensor in tensors])
        with self._model.on(self._model.host if place == "host" else None):
            return self._noted(schema, given, lambda: function(*args, **kwargs), what, place)

    def _noted(self, schema: Any, given: dict[str, list[Tensor]], run: Any, what: str, place: str) -> Any:
        """Runs an operation, and notes what it reads, writes and makes on the thread's current stream."""
        written = {each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write}
        for name, tensors in given.items():
            for tensor in tensors if name not in written else ():
                self._model.read(tensor, what)
        for name in sorted(written & given.keys()):
            for tensor in given[name]:
                self._model.write(tensor, what)
        old = [tensor for tensors in given.values() for tensor in tensors]
        result = run()
        made = _dense(result)
        if place != "host":
            self._model.took(CALL_S + BYTE_S * sum(tensor.nbytes for tensor in (*old, *made)))
        storages = {tensor.untyped_storage()._cdata for tensor in old}
        for tensor in made:
            if tensor.untyped_storage()._cdata not in storages:
                self._model.made(tensor, what, place)
        return result


# Operations whose result's shape, or value on the host, follows from the data.
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount", "equal")
BY_INDEX = ("index", "index_put", "index_put_")  # with a mask as index the shape follows from the data
# Methods that read a tensor's memory, which no dispatch mode sees on the CPU; and torch.tensor(..., device=...) copies
# from memory of the host, and waits for all that its stream was given.
READERS = ("tolist", "item", "numpy", "cpu", "__array__", "__dlpack__", "__bool__", "__float__", "__int__", "__index__")


class _Meter(TorchFunctionMode):
    """Notes the methods of tensors by which this thread would wait for the device."""

    def __init__(self, model: StreamModel) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READERS or (name == "tensor" and (kwargs or {}).get("device") is not None):
            self._model.note_host_read(name)
            with self._model.unmetered():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _dense(value: Any) -> list[Tensor]:
    """Returns the tensors with memory in an argument, in lists too; for a sparse one, its indices and values."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            return []
        parts = [value] if value.layout is torch.strided else [value._indices(), value._values()]
        return [part for part in parts if part.untyped_storage().nbytes()]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for each in value for tensor in _dense(each)]


def _place() -> str:
    """Returns the innermost line of gradsync, or of the test, that runs the operation; with "reference/" in a kernel.

    Other versions of a kernel than its definition wait for the device elsewhere, or nowhere.
    """
    frame, found = sys._getframe(2), ""
    while frame.f_back is not None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        if folder.endswith("kernels/reference"):
            return f"reference/{found or name}"
        if not found and ("/gradsync/" in folder or ("/tests" in folder and name != "stream_model.py")):
            found = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return found
