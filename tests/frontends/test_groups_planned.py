"""Plans of the averaging planner: exchanges behind a step, state sent beside parameters, and element types."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import gradsync
from gradsync.comm.shuffle import GroupSchedule, exact, grid, together
from gradsync.compressors import Cast
from gradsync.planner import AveragingPlanner
from gradsync.plans.plan import What
from tests.frontends.models import Convolutions, Perceptron
from tests.world import Ranks, on_all_ranks

World = Callable[[int], Ranks]
PAIRS = grid((2, 2))


def momentum_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def make(
    planner: AveragingPlanner,
    model: nn.Module | None = None,
    optimizer_of: Callable[[nn.Module], Optimizer] = momentum_sgd,
) -> tuple[nn.Module, Optimizer, gradsync.Attachment]:
    torch.manual_seed(0)
    model = model or Perceptron()
    optimizer = optimizer_of(model)
    return model, optimizer, gradsync.attach(model, optimizer, planner, timeout=10)


def backward(model: nn.Module, seed: int, shape: tuple[int, ...] = (5, 6)) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    model.zero_grad()
    model(torch.randn(shape, generator=generator)).square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, seed: int, shape: tuple[int, ...] = (5, 6)) -> None:
    backward(model, seed, shape)
    optimizer.step()


def an_exchange_behind_the_step_changes_nothing(early: bool, adaptive: bool) -> None:
    """Compares bit by bit with a model that waits for the exchange after each step."""
    optimizer_of = adam if adaptive else momentum_sgd
    model, optimizer, handle = make(AveragingPlanner(schedule=PAIRS, early=early), optimizer_of=optimizer_of)
    waiting, its_optimizer, its_handle = make(AveragingPlanner(schedule=PAIRS), optimizer_of=optimizer_of)
    assert handle.plan.what is (What.EARLY_PARAMETER if early else What.PARAMETER)
    for step in range(5):
        train(model, optimizer, step)
        train(waiting, its_optimizer, step)
        its_handle.wait()
    handle.wait()
    for ours, theirs in zip(model.parameters(), waiting.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for kept, expected in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert all(torch.equal(kept[key], expected[key]) for key in kept if isinstance(kept[key], Tensor))
    assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
    handle.detach()
    its_handle.detach()


@pytest.mark.parametrize(("early", "adaptive"), [(False, False), (True, False), (True, True)])
def test_an_exchange_behind_the_step_changes_nothing(world: World, early: bool, adaptive: bool) -> None:
    world(4).run(an_exchange_behind_the_step_changes_nothing, early, adaptive)


def modules_wait_for_their_own() -> list[str]:
    model, optimizer, handle = make(AveragingPlanner(schedule=together(2)))
    train(model, optimizer, 0)
    assert isinstance(model, Perceptron)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    model.layers[0](torch.zeros(1, 6))  # waits for this one
    now = on_all_ranks(model.layers[0].parameters())
    said = []
    assert torch.equal(now[0], now[1])
    model.state_dict()  # waits for all
    now = on_all_ranks(model.parameters())
    assert torch.equal(now[0], now[1])
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    train(model, optimizer, 2)
    with torch.no_grad():
        model.scale.mul_(2)  # of which no module of its own has a forward
    try:
        model(torch.zeros(1, 6))
    except RuntimeError as error:
        said.append(str(error))
    handle.detach()
    return said


def test_modules_wait_for_their_own_parameters_and_find_changed_ones(world: World) -> None:
    for said in world(2).run(modules_wait_for_their_own):
        assert len(said) == 1
        assert "'scale' was changed between optimizer.step() and the forward" in said[0]


def buffers_are_pooled_in_rounds() -> None:
    model, optimizer, handle = make(AveragingPlanner(schedule=together(2)), Convolutions())
    assert isinstance(model, Convolutions)
    own = []
    model.norm.register_forward_hook(
        lambda module, *_: own.append((module.running_mean.clone(), module.running_var.clone()))
    )
    train(model, optimizer, 0, (6, 2, 8, 8))
    handle.wait()
    (mean, variance) = own[0]
    means, variances = on_all_ranks([mean]), on_all_ranks([variance])
    torch.testing.assert_close(model.norm.running_mean, means.mean(0))
    pooled = (variances + means.square()).mean(0) - means.mean(0).square()
    torch.testing.assert_close(model.norm.running_var, pooled)
    handle.detach()


def test_buffers_of_floats_are_averaged_and_variances_pooled(world: World) -> None:
    world(2).run(buffers_are_pooled_in_rounds)


def momenta_are_averaged(every: int, adaptive: bool) -> None:
    model, optimizer, handle = make(
        AveragingPlanner(schedule=together(2), momentum_every=every), optimizer_of=adam if adaptive else momentum_sgd
    )
    keys = ("exp_avg", "exp_avg_sq") if adaptive else ("momentum_buffer",)
    for step in range(2 * every):
        train(model, optimizer, step)
        handle.wait()
        kept = on_all_ranks([optimizer.state[p][key] for p in model.parameters() if p.numel() for key in keys])
        same = torch.allclose(kept[0], kept[1], rtol=2**-7, atol=1e-3 * float(kept.abs().max()))
        assert same is (step % every == 0), step
    handle.detach()


@pytest.mark.parametrize(("every", "adaptive"), [(1, False), (3, False), (2, True)])
def test_momenta_are_averaged_in_one_round_of_several(world: World, every: int, adaptive: bool) -> None:
    world(2).run(momenta_are_averaged, every, adaptive)


def rounded_values_lose_nothing_of_the_mean() -> None:
    """Checks that rounding to 16 bits loses nothing: a rank keeps the rounding error for the next exchange."""
    planner = AveragingPlanner(schedule=PAIRS, compressor=Cast("bfloat16"))
    model, optimizer, handle = make(planner)
    initial = on_all_ranks(model.parameters())
    for step in range(6):
        handle.wait()
        alone = copy.deepcopy(model)
        twin = momentum_sgd(alone)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(alone, twin, step)
        train(model, optimizer, step)
        handle.wait()
        expected, now = on_all_ranks(alone.parameters()), on_all_ranks(model.parameters())
        torch.testing.assert_close(now.mean(0), expected.mean(0), rtol=1e-5, atol=1e-6)
        mixed = torch.from_numpy(PAIRS.round(step).mixing).float() @ expected
        furthest = float((expected - initial).abs().max())
        torch.testing.assert_close(now, mixed, rtol=0, atol=2**-7 * furthest)
    handle.consensus()
    now = on_all_ranks(model.parameters())
    assert all(torch.equal(row, now[0]) for row in now)
    handle.detach()


def test_rounded_values_lose_nothing_of_the_mean(world: World) -> None:
    world(4).run(rounded_values_lose_nothing_of_the_mean)


def training_resumes_rounded() -> None:
    planner = AveragingPlanner(schedule=PAIRS, compressor=Cast("bfloat16"), momentum_every=3)
    model, optimizer, handle = make(planner)
    for step in range(3):
        train(model, optimizer, step)
    content = io.BytesIO()
    torch.save([part.state_dict() for part in (model, handle, optimizer)], content)
    for step in range(3, 6):
        train(model, optimizer, step)
    handle.detach()
    other, its_optimizer, its_handle = make(planner)
    content.seek(0)
    for part, saved in zip((other, its_handle, its_optimizer), torch.load(content, weights_only=True), strict=True):
        part.load_state_dict(saved)
    for step in range(3, 6):
        train(other, its_optimizer, step)
    its_handle.detach()
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_training_resumes_between_consensus_points(world: World) -> None:
    world(4).run(training_resumes_rounded)


def what_early_steps_cannot_do_is_said() -> list[str]:
    said = []

    def clipped(model: nn.Module, optimizer: Optimizer) -> None:
        backward(model, 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    def twice(model: nn.Module, optimizer: Optimizer) -> None:
        backward(model, 0)
        backward(model, 1)

    def closed(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step(lambda: backward(model, 0) or 0.0)

    for attempt in (clipped, twice, closed):
        model, optimizer, handle = make(AveragingPlanner(schedule=together(2), early=True))
        try:
            attempt(model, optimizer)
        except RuntimeError as error:
            said.append(str(error))
        handle.detach()
    try:
        make(
            AveragingPlanner(schedule=together(2), early=True), optimizer_of=lambda m: torch.optim.LBFGS(m.parameters())
        )
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_early_steps_cannot_do_is_said(world: World) -> None:
    for said in world(2).run(what_early_steps_cannot_do_is_said):
        expected = ["was changed between backward and optimizer.step()", "second backward", "closure", "LBFGS"]
        assert len(said) == len(expected)
        for text, part in zip(said, expected, strict=True):
            assert part in text


def accumulated(early: bool) -> Tensor:
    """Runs two backwards for each step."""
    model, optimizer, handle = make(AveragingPlanner(schedule=together(2), early=early))
    for step in range(3):
        optimizer.zero_grad()
        with handle.no_sync():
            model(torch.full((2, 6), step + dist.get_rank() + 1.0)).square().mean().backward()
        model(torch.full((3, 6), step - dist.get_rank() - 1.0)).square().mean().backward()
        optimizer.step()
    handle.wait()
    handle.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def both_accumulate_alike() -> None:
    assert torch.equal(accumulated(early=True), accumulated(early=False))


def test_early_steps_take_what_local_backwards_left(world: World) -> None:
    world(2).run(both_accumulate_alike)


def links_are_measured() -> str:
    model, optimizer, handle = make(AveragingPlanner())
    plan = handle.plan.to_json()
    train(model, optimizer, 0)
    handle.detach()
    return plan


def test_links_are_measured_where_nothing_is_given(world: World) -> None:
    plans = world(3).run(links_are_measured)
    assert len(set(plans)) == 1


def wrong_settings() -> list[str]:
    said = []
    for planner, optimizer_of in (
        (AveragingPlanner(schedule=exact(5, 2)), momentum_sgd),
        (
            AveragingPlanner(schedule=together(2), momentum_every=1),
            lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9),
        ),
    ):
        try:
            make(planner, optimizer_of=optimizer_of)
        except ValueError as error:
            said.append(str(error))
    return said


def test_wrong_settings_are_refused(world: World) -> None:
    for said in world(2).run(wrong_settings):
        assert "the schedule is for 5, the job has 2 ranks on 1 nodes" in said[0]
        assert "what RMSprop keeps is not known" in said[1]
    with pytest.raises(ValueError, match="momentum_every"):
        AveragingPlanner(momentum_every=-1)
    with pytest.raises(ValueError, match="compressor"):
        AveragingPlanner(compressor="int8")


def test_a_schedule_is_kept(world: World) -> None:
    assert AveragingPlanner(schedule=PAIRS) == AveragingPlanner(schedule=GroupSchedule(PAIRS.rounds))


def models_of_many_kinds_train() -> None:
    """Trains with buffers beside momenta and mixed dtypes: the digest depends on one order of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8).double(), nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = gradsync.attach(model, optimizer, AveragingPlanner(schedule=together(2), momentum_every=1), timeout=10)
    for seed in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank()))
        optimizer.zero_grad()
        model[3](model[2](model[1](model[0](x)).double()).float()).square().mean().backward()
        optimizer.step()
    handle.wait()
    for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
        dist.broadcast(first := tensor.detach().clone(), 0)
        assert torch.equal(first, tensor)


def test_models_of_many_kinds_train(world: World) -> None:
    world(2).run(models_of_many_kinds_train)
