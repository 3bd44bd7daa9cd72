"""Routes in the engine: compression on backward's thread or on another core gives the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from gradsync.comm import GroupError, Ledger, LocalGroup, RecordingGroup, drive, run_local, torch_group
from gradsync.compressors import CompressorState, ErrorFeedback, TopK, register
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import transfers
from gradsync.costs.timeline import Task
from gradsync.engine.engine import Engine
from gradsync.engine.trial import RUN_OFF_ROUNDS, TURN_STEPS
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, CompressedTwoWay, Route, Scheme
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec, trainable_parameters
from tests.frontends.conservation import left_to_send
from tests.frontends.models import Perceptron
from tests.world import Ranks

SHAPES = {"first": (40, 5), "second": (300,), "third": (7,)}
FEEDBACK = ErrorFeedback(TopK(0.2))
WORKER = "gradsync offload"
TWO_WAY = ("compress@{}", "all_to_all", "decompress@{}", "compress@{}", "all_gather", "decompress@{}")
GATHERED = ("compress@{}", "all_gather", "decompress@{}")
NESTED = ("reduce_scatter", *GATHERED, "compress@{}", "all_gather", "decompress@{}")


def on(words: Sequence[str], device: str) -> tuple[str, ...]:
    return tuple(word.format(device) for word in words)


@register
@dataclass(frozen=True)
class Watched(TopK):
    """A top-k compressor that notes its thread, can be held at gates by a test, and can fail."""

    name = "watched"

    begun: ClassVar[threading.Event] = threading.Event()
    gate: ClassVar[threading.Event] = threading.Event()
    fails: ClassVar[bool] = False
    threads: ClassVar[list[str]] = []
    decoded: ClassVar[set[str]] = set()

    def sum_into(self, out: Tensor, payloads: Sequence[Any], scale: float = 1.0) -> None:
        self.decoded.add(threading.current_thread().name)
        super().sum_into(out, payloads, scale)

    def compress(self, x: Tensor, state: CompressorState) -> Any:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.gate.wait(20)
        if self.fails:
            raise ValueError("out of luck")
        return super().compress(x, state)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    for setting, value in (
        ("begun", threading.Event()),
        ("gate", threading.Event()),
        ("threads", []),
        ("decoded", set()),
    ):
        monkeypatch.setattr(Watched, setting, value)
    return Watched


def turns_between(group: LocalGroup, schemes: Sequence[Scheme[Any]]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Returns by parameter the gradients in, the gradients out and the residuals, after plans with these schemes."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
    cuts: list[list[list[str]]] = [[[name] for name in SHAPES], [list(SHAPES)]]
    plans = [
        Plan.make(specs, group.size, [(names, scheme) for names in cuts[number % 2]])
        for number, scheme in enumerate(schemes)
    ]
    ours = Engine(parameters, group, lambda profiles, size: plans, timeout_s=20)
    totals = {name: (torch.zeros(p.numel()), torch.zeros(p.numel())) for name, p in parameters.items()}
    ran: set[str] = set()
    for step in range(3 + (2 * len(plans) + 2 * RUN_OFF_ROUNDS) * TURN_STEPS):
        brought = gradients(group.rank, step)
        ours.begin()
        ran.add(ours.plan.digest)
        for name, gradient in brought.items():
            ours.load(name, gradient.clone())
        ours.finish()
        for name, (came_in, came_out) in totals.items():
            came_in.add_(brought[name].flatten())
            came_out.add_(group.size * ours.unload(name, None, sparse=False).flatten())
    assert ran == {plan.digest for plan in plans} and ours.settled
    left = left_to_send(torch.nn.ParameterDict(parameters), ours.state_dict()["state"])
    ours.close()
    return {name: (*total, left[name]) for name, total in totals.items()}


@pytest.mark.parametrize(
    "words",
    [
        ("reduce_scatter", *GATHERED, "all_gather"),
        ("reduce_scatter", "compress@{}", "all_to_all", "all_gather", "all_gather", "decompress@{}"),
        ("reduce", *GATHERED, "broadcast"),
        NESTED,
    ],
)
@pytest.mark.parametrize(
    "others", list(permutations((CompressedTwoWay(FEEDBACK), AllReduce()))), ids=("two-way", "all-reduce")
)
def test_nothing_is_lost_while_plans_with_routes_take_turns_with_others(
    words: tuple[str, ...], others: tuple[Scheme[Any], ...]
) -> None:
    schemes = [Route(on(words, "offload"), FEEDBACK, 2), *others]
    ranks = run_local(4, lambda group: turns_between(group, schemes), placement=Placement.regular(2, 2))
    for name in SHAPES:
        came_in, left = (sum(rank[name][part] for rank in ranks) for part in (0, 2))
        torch.testing.assert_close(came_in - left, ranks[0][name][1], rtol=1e-4, atol=1e-3)


def engine(group: LocalGroup, route: Route) -> Engine:
    """Returns an engine with a bucket for each parameter."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
    return Engine(parameters, group, Plan.make(specs, group.size, [([n], route) for n in SHAPES]), timeout_s=20)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(group: LocalGroup, route: Route, steps: int = 3) -> tuple[list[Tensor], dict[str, Any], list[Task]]:
    """Returns the gradients of all steps, the state after them, and the last step's timeline."""
    ours, given = engine(group, route), []
    for step in range(steps):
        ours.begin()
        for name, gradient in gradients(group.rank, step).items():
            ours.load(name, gradient)
        ours.finish()
        given += [ours.unload(name, None, sparse=False).clone() for name in SHAPES]
    kept, tasks, predicted = ours.state_dict()["state"], ours.running_plan.timeline(), ours.running_plan.statistics()
    ours.close()
    assert all(bucket.sent_bytes == bucket.predicted_bytes for bucket in predicted)
    return given, kept, tasks


@pytest.mark.parametrize(("words", "nodes"), [(TWO_WAY, 4), (GATHERED, 4), (NESTED, 2)])
def test_where_it_is_compressed_makes_no_difference_to_the_bits(words: tuple[str, ...], nodes: int) -> None:
    placement = Placement.regular(nodes, 4 // nodes)
    devices = {
        device: run_local(
            4, lambda group, d=device: train(group, Route(on(words, d), FEEDBACK, 4 // nodes)), placement=placement
        )
        for device in ("compute", "offload")
    }
    for (ours, kept, tasks), (theirs, their_state, others) in zip(*devices.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert kept.keys() == their_state.keys() and len(kept) > 0
        assert all(torch.equal(kept[key], their_state[key]) for key in kept)
        local = [word for word in words if "@" in word]
        streams = [task.stream for task in others]
        assert streams.count("offload") == len(local) * len(SHAPES) and streams.count("compute") == 1
        assert sum(task.stream == "compute" for task in tasks) == 1 + len(local) * len(SHAPES)
    assert WORKER not in [thread.name for thread in threading.enumerate()]


def test_another_core_compresses_while_backward_goes_on(watched: type[Watched]) -> None:
    """Work on the first bucket begins in the middle of backward and cannot end before all gradients are ready."""
    ours = engine(LocalGroup.world(1)[0], Route(on(GATHERED, "offload"), Watched(0.5)))
    ours.begin()
    ours.load("first", torch.ones(40, 5))
    assert watched.begun.wait(20), "before backward is over"
    ours.load("second", torch.ones(300))
    ours.load("third", torch.ones(7))
    watched.gate.set()
    ours.finish()
    tasks = {(task.name, task.stream): task for task in ours.running_plan.timeline()}
    work, backward = tasks["0:compress@offload", "offload"], tasks["backward", "compute"]
    assert backward.start_s <= work.start_s < backward.end_s and work.start_s < work.end_s
    assert set(watched.threads) == watched.decoded == {WORKER}
    ours.close()


def test_backward_s_thread_compresses_before_a_bucket_is_handed_on_and_decompresses(watched: type[Watched]) -> None:
    watched.gate.set()
    ours = engine(LocalGroup.world(1)[0], Route(on(GATHERED, "compute"), Watched(0.5)))
    ours.begin()
    for number, (name, shape) in enumerate(SHAPES.items(), start=1):
        ours.load(name, torch.ones(shape))
        assert watched.threads == [threading.current_thread().name] * number
    ours.finish()
    assert watched.decoded == {threading.current_thread().name}
    ours.close()


def test_a_failure_on_another_core_is_raised_on_its_rank_and_told_to_the_others(
    watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.gate.set()
    monkeypatch.setattr(watched, "fails", True)

    def rank_main(group: LocalGroup) -> str:
        compressor = Watched(0.5) if group.rank == 1 else TopK(0.5)
        ours = engine(group, Route(on(GATHERED, "offload"), compressor))
        ours.begin()
        for name, shape in SHAPES.items():
            ours.load(name, torch.ones(shape))
        with pytest.raises((ValueError, GroupError)) as caught:
            ours.finish()
        with pytest.raises(RuntimeError, match="gradient synchronisation stopped earlier"):
            ours.begin()
        ours.close()
        return f"{type(caught.value).__name__} {caught.value} {getattr(caught.value, '__notes__', '')}"

    first, second = run_local(2, rank_main)
    assert first.startswith("GroupError") and "rank 1: out of luck" in first
    assert second.startswith("ValueError out of luck") and "stage 'compress@offload', step 0" in second
    assert WORKER not in [thread.name for thread in threading.enumerate()]


def test_detach_in_the_middle_of_a_step_ends_the_worker(
    watched: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = LocalGroup.world(1)
    ours = engine(group, Route(on(GATHERED, "offload"), Watched(0.5)))
    monkeypatch.setattr(group, "announce_failure", lambda *told: watched.gate.set())  # once the step is given up
    ours.begin()
    ours.load("first", torch.ones(40, 5))
    ours.load("second", torch.ones(300))
    assert watched.begun.wait(20)
    ours.close()
    assert watched.threads == [WORKER], "the second bucket's work was not begun any more"
    assert WORKER not in [thread.name for thread in threading.enumerate()]


def trained(device: str) -> tuple[list[Tensor], set[str]]:
    """Returns the weights after some steps of a model with autograd hooks, and the last step's streams."""
    torch.manual_seed(0)
    model = Perceptron()
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    names, route = list(specs), Route(on(TWO_WAY, device), FEEDBACK)
    plan = Plan.make(specs, dist.get_world_size(), [(names[3:], route), (names[:3], route)])
    handle = gradsync.attach(model, plan=plan, timeout=10)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    streams = {task.stream for task in handle.timeline()}
    handle.detach()
    return [parameter.detach().clone() for parameter in model.parameters()], streams


def behind_autograd() -> None:
    (ours, streams), (theirs, others) = trained("compute"), trained("offload")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert "offload" in others and "offload" not in streams
    assert WORKER not in [thread.name for thread in threading.enumerate()]


def test_hooks_compress_on_either_device_to_the_same_bits(world: Callable[[int], Ranks]) -> None:
    world(2).run(behind_autograd)


GLOO_ROUTES = [
    ("reduce", "broadcast"),
    ("reduce_scatter", "all_gather"),
    on(("compress@{}", "gather", "decompress@{}", "compress@{}", "broadcast", "decompress@{}"), "offload"),
    on(("compress@{}", "all_to_all", "all_gather", "decompress@{}"), "compute"),
    ("reduce_scatter", "all_reduce", "all_gather"),
    ("reduce", *on(GATHERED, "offload"), "broadcast"),
    on(("compress@{}", "all_to_all", "gather", "broadcast", "decompress@{}", "all_gather"), "compute"),
    ("reduce", "reduce", *on(("compress@{}", "broadcast", "broadcast", "decompress@{}"), "compute")),
    on(("compress@{}", "gather", "all_to_all", "all_gather", "broadcast", "decompress@{}"), "offload"),
]


def on_gloo() -> None:
    """Compares each route on two nodes of two ranks with the mean, and its bytes with the prediction."""
    group = torch_group(timeout_s=20, placement=Placement.regular(2, 2))
    segments = tuple(Segment(name, 0, torch.Size(shape).numel()) for name, shape in SHAPES.items())
    bucket = Bucket("0", segments, tuple(TensorSpec(s, torch.float32) for s in SHAPES.values()), Layout.FLAT)
    inputs = [torch.randn(bucket.specs[0].numel, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    mean = torch.stack(inputs)[:, : bucket.numel].mean(dim=0)
    for words in GLOO_ROUTES:
        moves = [word for word in words if "@" not in word]
        lossless = TopK(1.0) if len(moves) < len(words) else None
        route = Route(words, lossless, 1 if len(moves) < 3 else 2)
        recording = RecordingGroup(group, Ledger())
        state = route.init(bucket, recording)
        coroutine = route.synchronize(inputs[group.rank].clone(), state, recording, 0.25)
        result, _ = drive(coroutine, timeout_s=20)
        torch.testing.assert_close(result[: bucket.numel], mean, msg=lambda text, w=words: f"{w}: {text}")
        everyone = group.all_gather(result.clone()).wait(20)
        assert all(torch.equal(theirs, result) for theirs in everyone), words
        predicted = transfers(route.steps(bucket.specs, (), group.placement))
        assert recording.ledger.sent_bytes == sum(t.sent_bytes(group.rank) for t in predicted), words
    group.close()


def test_routes_run_on_gloo_through_roots_too(world: Callable[[int], Ranks]) -> None:
    world(4).run(on_gloo)
