"""The engine on an accelerator, as a model: whatever order threads happen to run in, events order all accesses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync import kernels
from gradsync.comm import GroupError, LocalGroup, Work, run_local
from gradsync.compressors import ErrorFeedback, SharedBlockInt, TopK
from gradsync.compressors.transform import cosines
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import OFFLOAD
from gradsync.devices import host
from gradsync.engine.engine import Engine
from gradsync.engine.guard import Verification
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    AGSparse,
    AllReduce,
    CoarseGrained,
    CompressedAllGather,
    CompressedTwoWay,
    Hierarchical,
    PowerSGD,
    Route,
    Scheme,
)
from gradsync.schemes.hash_lists import forget, owned_by_hash
from gradsync.tensors.bucket import Layout, TensorSpec
from tests.compressors.family import MEMBERS as COMPRESSORS
from tests.schemes.contract import name_of
from tests.schemes.family import ALL_MEMBERS, Member
from tests.stream_model import ModelGroup, ModelStreams, StreamModel, UnorderedAccessError

pytestmark = pytest.mark.streams

STEPS = 2  # so that memory of the first is lent out anew
SHAPES = {"a.weight": (40, 8), "b.weight": (24, 8), "c.weight": (56, 4)}


@pytest.fixture(autouse=True)
def reference_kernels() -> Iterator[None]:
    with kernels.use("reference"):
        yield


def train(scheme: Scheme[Any], model: StreamModel, placement: Placement, *, collects: bool = False) -> None:
    """Trains `STEPS` steps on ranks as threads; each parameter is a bucket of its own.

    `collects`: takes each result as soon as it is there, instead of all at the end.
    """
    rows, size = scheme.traits.layout is Layout.ROWS, placement.size

    def rank_main(group: LocalGroup) -> None:
        with model.on():
            parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
            plan = Plan.make(specs, size, [([name], scheme) for name in reversed(SHAPES)])
            names = frozenset(SHAPES) if rows else frozenset()
            group = ModelGroup(model, group)
            engine = Engine(
                parameters, group, plan, timeout_s=20, sparse_names=names, verification=Verification(every=2)
            )
            try:
                for step in range(STEPS):
                    engine.begin()
                    for name in reversed(SHAPES):
                        engine.load(name, gradient(SHAPES[name], 10 * step + group.rank, rows=rows))
                    if collects and engine.goes_on_alone:
                        engine.go_on()
                        for name in reversed(SHAPES):
                            engine.collect(name)
                            parameters[name].add_(engine.unload(name, None, sparse=rows), alpha=-0.1)
                    engine.finish()
                    if not (collects and engine.goes_on_alone):
                        for name, parameter in parameters.items():
                            parameter.add_(engine.unload(name, None, sparse=rows), alpha=-0.1)
                    engine.stepped()
            finally:
                engine.close()

    with model.installed():
        run_local(size, rank_main, placement=placement)


def gradient(shape: tuple[int, int], seed: int, *, rows: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator)
    if not rows:
        return dense
    indices = torch.randperm(shape[0], generator=generator)[: shape[0] // 4].sort().values
    return torch.sparse_coo_tensor(indices[None], dense[indices], shape, is_coalesced=True, check_invariants=False)


@pytest.mark.parametrize("member", ALL_MEMBERS, ids=name_of)
def test_all_accesses_are_ordered_by_events(member: Member) -> None:
    size = min(size for size in member.sizes if size > member.ranks_per_node(size))
    scheme = member.scheme
    if isinstance(scheme, Hierarchical | Route):
        scheme = replace(scheme, ranks_per_node=member.ranks_per_node(size))
    model = StreamModel()
    train(scheme, model, member.placement(size))
    require_stated_waits(model, scheme, size)


FEW = ErrorFeedback(TopK(0.2))
TWO_WAY = ("compress@{0}", "all_to_all", "decompress@{1}", "compress@{0}", "all_gather", "decompress@{1}")
ROUTES = {
    f"{first} and {last}": Route(tuple(word.format(first, last) for word in TWO_WAY), FEW)
    for first in ("compute", "offload")
    for last in ("compute", "offload")
}
AGREEING = {
    f"agreeing, {first} and {last}": Route(
        (f"compress@{first}", "all_reduce", f"decompress@{last}"), ErrorFeedback(SharedBlockInt(2))
    )
    for first in ("compute", "offload")
    for last in ("compute", "offload")
}
LOSSY: dict[str, Scheme[Any]] = {
    **{name: CompressedAllGather(member.compressor) for name, member in COMPRESSORS.items()},
    "two-way": CompressedTwoWay(FEW),
    "powersgd": PowerSGD(2),
    "late chunks": CoarseGrained(chunk=16, ratio=0.3),
    "exact chunks": CoarseGrained(chunk=16, ratio=0.3, choice="exact", scoring="relative", momentum=0.9),
    **ROUTES,
    **AGREEING,
}


@pytest.mark.parametrize("scheme", LOSSY.values(), ids=LOSSY)
def test_so_are_those_of_what_is_compressed(scheme: Scheme[Any]) -> None:
    model = StreamModel()
    train(scheme, model, Placement.one_per_node(2))
    require_stated_waits(model, scheme, 2)


@pytest.mark.parametrize("scheme", [AllReduce(), CompressedAllGather(FEW), AGSparse()], ids=lambda scheme: scheme.title)
def test_so_are_those_of_results_that_are_taken_one_by_one(
    scheme: Scheme[Any],
) -> None:
    model = StreamModel()
    train(scheme, model, Placement.one_per_node(2), collects=True)
    require_stated_waits(model, scheme, 2)


# Where the device is read at times, not in steady steps: agreements of the first steps, comparisons of parameters.
AT_TIMES = ("observation.py", "guard.py")
TABLE = re.compile(r"^\| `(\w+)` \| (\d+)(?:-(\d+))? \|", re.MULTILINE)
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "gpu.md"
# By name: the fewest and the most waits for the device a bucket and step, as the page has them.
STATED = {
    name: range(int(low), int(high or low) + 1) for name, low, high in TABLE.findall(PAGE.read_text(encoding="utf-8"))
}


def require_stated_waits(model: StreamModel, scheme: Scheme[Any], size: int) -> None:
    """Fails where a steady step waits outside of what it issues, or where issuing waits unlike the page says."""
    reads = [(stream, read) for stream, read in model.host_reads if not any(at in read for at in AT_TIMES)]
    assert not {read for stream, read in reads if stream == "thread"}
    waits = math.ceil(len(reads) / (size * STEPS * len(SHAPES)))
    assert (waits > 0) == scheme.traits.waits_for_device, reads
    if waits:
        names = [part for part in re.findall(r"\w+", scheme.title) if part in STATED] or [scheme.name]
        assert any(waits in STATED[name] for name in names), (waits, names, set(reads))


def read_on(model: StreamModel, name: str | None, read: Callable[[Tensor], object]) -> list[tuple[str, str]]:
    """Returns what the model notes where a thread reads a tensor on its own stream, or on that of the name."""
    stream = None if name is None else (name,)

    def work() -> None:
        with model.on(stream):
            tensor = torch.arange(1, 2)
            with model.elsewhere("somewhere.py"):
                read(tensor)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    return model.host_reads


@pytest.mark.parametrize("name", [None, "communication"])
@pytest.mark.parametrize(
    "read",
    [
        Tensor.tolist,
        Tensor.item,
        Tensor.cpu,
        Tensor.numpy,
        Tensor.nonzero,
        bool,
        int,
        float,
        torch.from_dlpack,
        torch.unique,
        torch.bincount,
        lambda x: x.repeat_interleave(x),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x.clone()),
        lambda x: x.index_put_((x > 0,), x.new_zeros(())),
        lambda x: torch.tensor([1], device=x.device),
    ],
)
def test_each_way_to_wait_for_the_device_is_noted(name: str | None, read: Callable[[Tensor], object]) -> None:
    found = read_on(StreamModel(), name, read)
    assert found and {stream for stream, _ in found} == {name or "thread"}


def work_whose_input_goes(model: StreamModel) -> None:
    """Runs work on another stream than that of its input, of which nobody else holds anything when the work is done."""
    engine = ModelStreams(model)
    with model.on(("communication",)):
        inputs = [torch.ones(4)]
        work = Work(lambda: inputs.pop().sum(), OFFLOAD, "sum", lambda: list(inputs))
        work.follow(engine)
        with model.on(("offload",)):
            work.run()
        torch.ones(4)


def read_from_a_cache(made: Callable[[], Tensor], model: StreamModel) -> None:
    """Reads a tensor on another stream than that on which it is made, once for all."""
    cosines.cache_clear()
    forget()
    with model.installed():
        with model.on(("communication",)):
            tensor = made()
        with model.on(("thread",)):
            tensor.sum()


# Without the event that is recorded in this function, or the objects that it keeps, which scheme runs wrong, and how.
CPU = torch.device("cpu")
FEW_GATHERED = CompressedAllGather(FEW)
HERE, AWAY = ROUTES["compute and compute"], ROUTES["offload and offload"]
MUTATIONS: dict[str, tuple[Scheme[Any] | Callable[[StreamModel], None], bool]] = {
    "Synchronization.mark_ready": (FEW_GATHERED, False),
    "Synchronization._run_turns waits": (FEW_GATHERED, False),
    "Synchronization.advance": (FEW_GATHERED, False),
    "Synchronization.wait waits": (FEW_GATHERED, False),
    "Synchronization._resume": (FEW_GATHERED, True),
    "Synchronization.wait_for waits": (FEW_GATHERED, True),
    "Synchronization._prepare": (AWAY, False),
    "Synchronization._prepare waits": (AWAY, False),
    "Peers.aside": (FEW_GATHERED, False),
    "Peers.aside.<locals>.run waits": (FEW_GATHERED, False),
    "Work.follow": (HERE, False),
    "Work.run waits": (HERE, False),
    "Work.run": (AWAY, False),
    "Work._result_of waits": (AWAY, False),
    "Work.run keeps": (work_whose_input_goes, False),
    "fetch settles": (AWAY, False),
    "cosines settles": (partial(read_from_a_cache, lambda: cosines(8, torch.float32, CPU)), False),
    "owned_by_hash settles": (partial(read_from_a_cache, lambda: owned_by_hash(64, 2, 0, CPU)[0]), False),
}


@pytest.mark.parametrize("without", MUTATIONS)
def test_each_event_is_needed(without: str) -> None:
    scheme, collects = MUTATIONS[without]
    with pytest.raises((UnorderedAccessError, GroupError), match="without an event"):
        for _ in range(20):  # threads happen to run in some order
            model = StreamModel(without)
            if callable(scheme):
                scheme(model)
            else:
                train(scheme, model, Placement.one_per_node(2), collects=collects)
            assert model.left_out


def test_memory_of_the_host_and_of_the_device_meet_only_in_copies() -> None:
    model = StreamModel()
    with model.installed(), model.on(("offload",)):
        device = torch.ones(4) * 2
        (there,) = host.fetch([device])
        host.send(there * 2, device)
        with pytest.raises(UnorderedAccessError, match="the host meets the device's"):
            device.add_(there)


@pytest.mark.parametrize("function", [scheme for scheme, _ in MUTATIONS.values() if callable(scheme)])
def test_nothing_of_these_is_unordered_with_its_event(function: Callable[[StreamModel], None]) -> None:
    function(StreamModel())


def test_the_page_names_the_events_that_are_needed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("<!-- events: begin -->")[2].partition("<!-- events: end -->")[0]
    assert re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE) == list(MUTATIONS)
