"""Plans with coarse-grained schemes: all ranks choose the same chunks, whatever is frozen, skipped or loaded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.planner import CompressingPlanner
from gradsync.schemes import CoarseGrained, HalfPrecision, Scheme
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.conservation import left_to_send
from tests.frontends.models import Branches, Perceptron
from tests.frontends.test_compressed import gradients_of, plan_for
from tests.frontends.test_oracle import UNUSED, rows, train_step
from tests.frontends.twins import Twin, compare_with_ddp, momentum
from tests.world import Ranks

World = Callable[[int], Ranks]

LATE = CoarseGrained(ratio=0.25, chunk=8)
EXACT = replace(LATE, choice="exact")
BFLOAT16, FLOAT16 = HalfPrecision(values="bfloat16"), HalfPrecision(values="float16")
both_choices = pytest.mark.parametrize("scheme", [LATE, EXACT], ids=["late", "exact"])
every_kind = pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(LATE, id="late"),
        pytest.param(EXACT, id="exact"),
        pytest.param(replace(LATE, scheme=BFLOAT16, max_age=4), id="late bfloat16"),
        pytest.param(replace(EXACT, scheme=BFLOAT16, scoring="relative"), id="exact bfloat16"),
        pytest.param(replace(LATE, scheme=FLOAT16, scoring="relative"), id="late float16"),
        pytest.param(replace(EXACT, scheme=FLOAT16, scoring="agreement", max_age=4), id="exact float16"),
        pytest.param(replace(LATE, scoring="agreement", momentum=0.9), id="late momentum"),
        pytest.param(HalfPrecision(EXACT), id="around exact"),
    ],
)


def by_layers(model: nn.Module, scheme: Scheme[Any]) -> Plan:
    """Returns a plan with one bucket for each layer of a `Perceptron`; the scalar is in the last one."""
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    layers = [[name for name in specs if name.startswith(f"layers.{number}.")] for number in (4, 2, 0)]
    layers[0] += ["scale", "nothing"]
    return Plan.make(specs, dist.get_world_size(), [(names, scheme) for names in layers])


def attached(scheme: Scheme[Any]) -> tuple[Perceptron, gradsync.Attachment]:
    torch.manual_seed(0)
    model = Perceptron()
    return model, gradsync.attach(model, plan=by_layers(model, scheme), timeout=10)


def bad_chunks_leave_no_trace(scheme: Scheme[Any]) -> list[tuple[set[int], set[int]]]:
    """Makes three chunks of a bucket non-finite on rank 1, in turns; returns which, and which were sent."""
    model, handle = attached(scheme)
    other, without = attached(scheme)
    weight, seen = model.layers[2].weight, []
    for step in range(4):
        bad, value = range(step, step + 3), (torch.inf, torch.nan, -torch.inf)[step % 3]

        def spoilt(gradient: Tensor, bad: Iterable[int] = bad, value: float = value) -> Tensor:
            chunks = gradient.clone().view(-1, 8)
            chunks[list(bad), 3] = value
            return chunks.view_as(gradient)

        before = handle.state_dict()["state"]
        spoiling = weight.register_hook(spoilt) if dist.get_rank() == 1 else None
        assert all(gradient.isnan().all() for gradient in gradients_of(model, seed=step).values())
        if spoiling is not None:
            spoiling.remove()
        seen.append((set(bad), {start // 8 for start, _ in handle.arrived(weight) or ()}))
        after = handle.state_dict()["state"]
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], values) for key, values in before.items())
        ours, theirs = gradients_of(model, seed=step), gradients_of(other, seed=step)
        assert all(torch.equal(ours[name], gradient) for name, gradient in theirs.items())
    for end in (handle, without):
        end.detach()
    return seen


@every_kind
def test_what_is_not_finite_on_one_rank_in_chunks_that_are_not_sent_leaves_no_trace(
    world: World, scheme: Scheme[Any]
) -> None:
    first, second = world(2).run(bad_chunks_leave_no_trace, scheme)
    assert first == second
    assert all(bad - sent for bad, sent in first), "fewer places than bad chunks"
    if isinstance(scheme, CoarseGrained) and scheme.choice == "late":
        assert any(not bad & sent for bad, sent in first), "of which none was sent"


def moved_in_steps(kind: str) -> list[int]:
    """Returns how many elements of a weight move in a step: of two optimisers, or of a local one after a shared one."""
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
    plan = plan_for(model, CoarseGrained(ratio=0.25, chunk=16, freeze=True))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model]
    behind = DistributedDataParallel(model) if kind == "behind DDP" else model
    handle = gradsync.attach(behind, optimizers[0] if kind == "given" else None, plan=plan, timeout=10)

    def step(local: bool) -> list[int]:
        before = [part.weight.detach().clone() for part in model]
        with (behind.no_sync() if behind is not model else handle.no_sync()) if local else nullcontext():
            for part in model:
                part.weight.grad = None
            sum(part(torch.ones(2, 16)).square().sum() for part in model).backward()
        for optimizer in optimizers:
            optimizer.step()
        return [int((old != part.weight).sum()) for old, part in zip(before, model, strict=True)]

    step(local=False)
    moved = step(local=kind != "given")
    handle.detach()
    return moved


def test_a_second_optimiser_also_leaves_alone_what_did_not_arrive(world: World) -> None:
    for moved in world(2).run(moved_in_steps, "given"):
        assert sum(moved) <= 128 + 16, "a quarter, in whole chunks"


@pytest.mark.parametrize("kind", ["local", "behind DDP"])
def test_a_local_step_moves_all_that_has_a_gradient(world: World, kind: str) -> None:
    for moved in world(2).run(moved_in_steps, kind):
        assert moved == [256, 256]


def all_that_comes_in(scheme: CoarseGrained) -> None:
    """Compares with DDP a plan that sends all chunks; the model is used as a whole and in parts."""

    def in_turns(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(rows(), ((number + dist.get_rank()) % 2,)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Perceptron, train_step, options={"plan": plan_for(Perceptron(), scheme)}, optimizer=momentum)
    compare_with_ddp(Branches, in_turns, options={"plan": plan_for(Branches(), scheme)}, **UNUSED)


@pytest.mark.parametrize(("choice", "size"), [("late", 2), ("exact", 3)])
@pytest.mark.parametrize("settings", [{"chunk": 1 << 15}, {"chunk": 8, "ratio": 1.0}], ids=["one chunk", "dense"])
def test_a_model_smaller_than_a_chunk_and_all_chunks_have_ddps_gradients(
    world: World, settings: dict[str, Any], choice: str, size: int
) -> None:
    world(size).run(all_that_comes_in, CoarseGrained(choice=choice, **settings))


def places_of_two_layers(scheme: CoarseGrained, every: int) -> list[list[list[int]]]:
    """Returns which chunks of two layers in a bucket arrive in each step; from step 7 on the first is rarely used."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
    handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
    generator = torch.Generator().manual_seed(dist.get_rank())
    arrived = []
    for step in range(67):
        model.zero_grad()
        is_used = step < 6 or step % every == 0
        model[0].requires_grad_(is_used)
        layers = model if is_used else model[1:]
        sum(layer(torch.randn(5, 16, generator=generator)).square().mean() for layer in layers).backward()
        sections = [handle.arrived(layer.weight) or () for layer in model]
        arrived.append([[start // scheme.chunk for start, _ in each] for each in sections])
    handle.detach()
    return arrived[6:]


def chunks_in(steps: list[list[list[int]]], layer: int) -> set[int]:
    return {chunk for step in steps for chunk in step[layer]}


@both_choices
def test_what_is_frozen_stops_no_other_chunk_and_takes_no_place(world: World, scheme: CoarseGrained) -> None:
    first, second = world(2).run(places_of_two_layers, scheme, 1000)
    assert first == second
    assert chunks_in(first, 1) == set(range(32)), "every chunk has its turn"
    assert not chunks_in(first[30:], 0)


@both_choices
def test_what_is_used_now_and_then_has_its_turn(world: World, scheme: CoarseGrained) -> None:
    first, second = world(2).run(places_of_two_layers, replace(scheme, ratio=0.5), 3)
    assert first == second
    assert chunks_in(first[::3], 0) == chunks_in(first, 1) == set(range(32)), "in steps that use it"


def loaded_apart(scheme: CoarseGrained) -> list[object]:
    """Returns the chunks that arrive after rank 1 loaded no knowledge of chunks, or another one."""
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
    for step in range(4):
        gradients_of(model, seed=step)
    saved = handle.state_dict()
    elsewhere = {key: values.flip(0) if "//" in key else values for key, values in saved["state"].items()}
    arrived = []
    for state in ({}, elsewhere):
        handle.load_state_dict({**saved, "state": state} if dist.get_rank() == 1 else saved)
        kept = handle.state_dict()["state"]
        for key, values in (state if dist.get_rank() == 1 else saved["state"]).items():
            assert "//" in key or torch.equal(kept[key], values), "what is left to be sent is a rank's own"
        for step in range(3):
            gradients_of(model, seed=10 + step)
            arrived.append([handle.arrived(parameter) for parameter in model.parameters()])
    handle.detach()
    return arrived


@pytest.mark.parametrize("scheme", [replace(LATE, max_age=3), replace(EXACT, max_age=3)], ids=["late", "exact"])
def test_ranks_that_were_given_other_scores_choose_alike(world: World, scheme: CoarseGrained) -> None:
    first, second = world(2).run(loaded_apart, scheme)
    assert first == second


def another_ratio(scheme: CoarseGrained) -> None:
    """Changes plans between steps: residuals stay, and are sent by the new ratios, in other buckets too."""
    model, handle = attached(scheme)
    came_in = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    came_out = copy.deepcopy(came_in)
    alone = copy.deepcopy(model)
    plans = [
        by_layers(model, replace(scheme, ratio=0.5)),
        plan_for(model, replace(scheme, ratio=0.1)),
        plan_for(model, replace(scheme, ratio=1.0)),
    ]
    for step, plan in enumerate([None, *plans]):
        if plan is not None:
            before = left_to_send(model, handle.state_dict()["state"])
            handle._engine.propose([plan])
            gradients_of(model, seed=0, factor=torch.nan if dist.get_rank() == 1 else 1.0)  # under the new plan
            assert handle.plan == plan
            after = left_to_send(model, handle.state_dict()["state"])
            assert all(torch.equal(after[name], values) for name, values in before.items())
            assert any(values.any() for values in before.values())
        for seed in (step, 10 + step):
            for name, gradient in gradients_of(model, seed).items():
                came_out[name] += dist.get_world_size() * gradient
            for name, gradient in gradients_of(alone, seed).items():
                came_in[name] += gradient
    left = left_to_send(model, handle.state_dict()["state"])
    assert not any(values.any() for values in left.values()), "all was sent"
    for name, total in came_in.items():
        dist.all_reduce(total)
        torch.testing.assert_close(came_out[name], total, rtol=1e-5, atol=1e-5)
    handle.detach()


@both_choices
def test_another_ratio_from_one_step_to_the_next_loses_nothing(world: World, scheme: CoarseGrained) -> None:
    world(2).run(another_ratio, scheme)


class OutOfOrder(nn.Module):
    """Layers that are used in another order than they are registered in; that of two of them depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(16, 3), nn.Linear(6, 16)
        self.ways = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Returns 3 values for each row of `x`."""
        hidden, ways = self.first(x).tanh(), list(self.ways)
        one, other = ways if x.sum() > 0 else reversed(ways)
        return self.last((one(hidden) + other(hidden)).tanh())


def resumed(make: Callable[[], nn.Module], scheme: CoarseGrained, behind_ddp: bool) -> None:
    """Saves in a dense warm-up step and in one of half the chunks; the rest of the run must agree bit by bit.

    A `Perceptron` gets a plan, other models a planner.
    """
    runs: list[dict[str, Any]] = []
    for start in (0, 1, 3):
        torch.manual_seed(start)
        module = make()
        model = DistributedDataParallel(module) if behind_ddp else module
        plan = by_layers(module, scheme) if isinstance(module, Perceptron) else CompressingPlanner(scheme)
        handle = gradsync.attach(model, plan=plan, timeout=10)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.0 if scheme.momentum else 0.9)
        parts = {"model": module, "optimizer": optimizer, "gradsync": handle}
        for step in range(start, 7):
            if start and step == start:
                content = io.BytesIO()
                torch.save(runs[step], content)
                content.seek(0)
                for name, saved in torch.load(content, weights_only=True).items():
                    parts[name].load_state_dict(saved)
            now = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
            if not start:
                runs.append(now)
            elif step > 1:  # after the first step the plan is about to be replaced: loading does so at once
                assert_equal(now, runs[step])
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(5, 6, generator=generator)).square().mean().backward()
            optimizer.step()
        handle.detach()


def assert_equal(one: Any, other: Any) -> None:
    """Asserts that two states agree bit by bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, list):
        for each, its in zip(one, other, strict=True):
            assert_equal(each, its)
    else:
        assert one == other


@pytest.mark.parametrize("behind_ddp", [False, True], ids=["attach", "ddp"])
@pytest.mark.parametrize("make", [Perceptron, OutOfOrder])
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(replace(LATE, scheme=FLOAT16, scoring="agreement", max_age=3), id="late"),
        pytest.param(replace(EXACT, scheme=BFLOAT16, scoring="relative", freeze=True), id="exact"),
        pytest.param(replace(LATE, momentum=0.9, scoring="relative"), id="momentum"),
    ],
)
def test_a_run_resumed_in_its_warm_up_is_the_same_bit_by_bit(
    world: World, scheme: CoarseGrained, make: Callable[[], nn.Module], behind_ddp: bool
) -> None:
    world(2).run(resumed, make, replace(scheme, warmup=(1.0, 0.5), steps_per_ratio=2), behind_ddp)
