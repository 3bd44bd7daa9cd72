"""Averages of parameters where a training loop does something out of the ordinary."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync import Plan
from gradsync.comm import GroupError, LocalGroup
from gradsync.comm.shuffle import GroupSchedule, exact, grid, together
from gradsync.compressors import Cast
from gradsync.frontends import averaging, mean_model
from gradsync.planner import AveragingPlanner
from gradsync.plans.plan import What
from gradsync.schemes import AllReduce, Shuffled
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.models import Branches, Checkpointed, MixedPrecision, Perceptron, TiedTable
from tests.world import Ranks

World = Callable[[int], Ranks]
both_ways = pytest.mark.parametrize("early", [False, True], ids=["after the step", "early"])


def momentum_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def make(
    model: nn.Module | None = None,
    optimizer_of: Callable[[nn.Module], Optimizer] = momentum_sgd,
    schedule: GroupSchedule | None = None,
    **settings: Any,
) -> tuple[Any, Optimizer, gradsync.Attachment]:
    if model is None:
        torch.manual_seed(0)
        model = Perceptron()
    optimizer = optimizer_of(model)
    planner = AveragingPlanner(schedule=schedule or together(dist.get_world_size()), **settings)
    return model, optimizer, gradsync.attach(model, optimizer, planner, timeout=10)


def backward(model: nn.Module, seed: int, shape: tuple[int, ...] = (5, 6)) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    model(torch.randn(shape, generator=generator)).square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, seed: int, shape: tuple[int, ...] = (5, 6)) -> None:
    optimizer.zero_grad()
    backward(model, seed, shape)
    optimizer.step()


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def same_on_all(tensor: Tensor) -> bool:
    mine = tensor.detach().contiguous()
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return all(torch.equal(found[0], theirs) for theirs in found)


def error_of(attempt: Callable[[], Any]) -> str:
    """Returns the text of the error that `attempt` raises, or ""."""
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


# Values.


class Masked(nn.Module):
    """Attention masks are buffers of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) @ self.mask.softmax(1)).square()


def infinite_buffers_do_no_harm(early: bool) -> None:
    torch.manual_seed(0)
    schedule = together(2) if dist.get_world_size() == 2 else exact(3, 2)
    model, optimizer, handle = make(Masked(), schedule=schedule, early=early)
    mask = model.mask.clone()
    for step in range(3):
        train(model, optimizer, step)
    handle.wait()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert torch.equal(model.mask, mask)
    handle.consensus()
    assert torch.equal(model.mask, mask)
    handle.detach()


@both_ways
@pytest.mark.parametrize("size", [2, 3])
def test_infinite_buffers_do_no_harm(world: World, size: int, early: bool) -> None:
    world(size).run(infinite_buffers_do_no_harm, early)


def variances_stay_variances() -> None:
    model, optimizer, handle = make(nn.BatchNorm1d(6), schedule=exact(3, 2))
    far = torch.linspace(100, 900, 6).repeat(8, 1)
    noise = 1e-2 * torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(60):
        optimizer.zero_grad()
        model(far + noise).square().mean().backward()
        optimizer.step()
        handle.wait()
        assert bool((model.running_var >= 0).all())
    with torch.no_grad():
        model.running_mean.copy_(far[0])
        model.running_var.fill_(1e-4)
    handle.consensus()
    torch.testing.assert_close(model.running_var, torch.full((6,), 1e-4), rtol=1e-3, atol=0)
    handle.detach()


def test_variances_of_features_far_from_zero_stay_variances(world: World) -> None:
    world(3).run(variances_stay_variances)


def one_rank_is_alone(early: bool) -> None:
    model, optimizer, handle = make(early=early, momentum_every=2, schedule=None)
    torch.manual_seed(0)
    twin = Perceptron()
    plain = momentum_sgd(twin)
    for step in range(3):
        train(model, optimizer, step)
        train(twin, plain, step)
    handle.consensus()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    handle.detach()


@both_ways
def test_one_rank_trains_as_without(world: World, early: bool) -> None:
    world(1).run(one_rank_is_alone, early)


def odd_model(kind: str) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """Returns a model, and a function that runs its forward."""
    torch.manual_seed(0)

    def words(model: nn.Module, seed: int) -> Tensor:
        ids = torch.randint(12, (4, 3), generator=torch.Generator().manual_seed(seed + dist.get_rank()))
        return model(ids)

    def vectors(model: nn.Module, seed: int) -> Tensor:
        return model(torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank())))

    def branch(model: nn.Module, seed: int) -> Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
        return model(x, (dist.get_rank() if seed % 2 else 0,))

    def twice(model: nn.Module, seed: int) -> Tensor:
        return vectors(model, seed) + vectors(model, seed + 1)

    frozen = Perceptron()
    frozen.layers[0].requires_grad_(False)
    return {
        "tied": (TiedTable(sparse=False), words),
        "three types": (MixedPrecision(), vectors),
        "sixteen bits": (Perceptron(torch.bfloat16), lambda m, seed: vectors(lambda x: m(x.bfloat16()), seed)),
        "branches": (Branches(), branch),
        "frozen": (frozen, vectors),
        "twice": (Perceptron(), twice),
    }[kind]


def odd_models_mix(kind: str, early: bool) -> None:
    """Compares each model with the same steps averaged by hand."""
    model, forward = odd_model(kind)
    of = dict.fromkeys(["branches"], lambda m: AdamW(m.parameters(), lr=0.01))
    optimizer_of = of.get(
        kind, lambda m: SGD([{"params": [p], "lr": 0.01 * n} for n, p in enumerate(m.parameters(), 1)], momentum=0.9)
    )
    alone = copy.deepcopy(model)
    twin = optimizer_of(alone)
    model, optimizer, handle = make(model, optimizer_of, early=early)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, twin)]
    for step in range(4):
        for each, its in ((model, optimizer), (alone, twin)):
            its.zero_grad(set_to_none=step % 2 == 0)
            forward(each, step).float().square().mean().backward()
            its.step()
        with torch.no_grad():
            for p in alone.parameters():
                if p.requires_grad:
                    p.copy_(mean_over_ranks(p))
        for scheduler in schedulers:
            scheduler.step()
    handle.wait()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    handle.detach()


@both_ways
@pytest.mark.parametrize("kind", ["tied", "three types", "sixteen bits", "branches", "frozen", "twice"])
def test_odd_models_mix_like_others(world: World, kind: str, early: bool) -> None:
    world(2).run(odd_models_mix, kind, early)


def momenta_of_what_one_rank_uses(early: bool) -> None:
    """Trains a branch that at first only rank 0 takes, later rank 1 too."""
    torch.manual_seed(0)
    model, optimizer, handle = make(Branches(), lambda m: Adam(m.parameters(), lr=0.01), momentum_every=1, early=early)
    for step in range(5):
        optimizer.zero_grad()
        taken = (0,) if dist.get_rank() == 0 or step == 4 else (1,)
        model(torch.ones(2, 6), taken).square().mean().backward()
        optimizer.step()
        handle.wait()
        for branch in model.branches[:2]:
            kept = optimizer.state[branch.weight]
            assert torch.isclose(kept["exp_avg_sq"], mean_over_ranks(kept["exp_avg_sq"]), rtol=2**-6).all()
    handle.detach()


@both_ways
def test_momenta_of_parameters_that_some_rank_did_not_use_yet_are_averaged(world: World, early: bool) -> None:
    world(2).run(momenta_of_what_one_rank_uses, early)


class Replacing(nn.Module):
    """A module whose buffer is another tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.average = 0.5 * self.average + 0.5 * out.detach().mean(0)
        return out


def replaced_buffers_are_averaged() -> None:
    torch.manual_seed(0)
    model, optimizer, handle = make(Replacing())
    for step in range(2):
        train(model, optimizer, step)
    handle.wait()
    assert same_on_all(model.average) and bool(model.average.any())
    handle.detach()


def test_buffers_that_modules_replace_are_averaged(world: World) -> None:
    world(2).run(replaced_buffers_are_averaged)


# Reads of parameters in the middle of an exchange.


class Functional(nn.Module):
    """A module that uses a layer's weight without calling the layer, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.fast = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias) if self.fast else self.layer(x)


def evaluation_sees_averages(inference: bool) -> None:
    torch.manual_seed(0)
    model, optimizer, handle = make(Functional(), compressor=Cast("bfloat16"), momentum_every=1)
    for step in range(3):
        train(model, optimizer, step)
        train(model, optimizer, step + 10)
        model.fast = True
        with torch.inference_mode(inference), torch.no_grad():
            out = model(torch.ones(1, 6)).clone()
        model.fast = False
        handle.wait()
        with torch.no_grad():
            assert torch.equal(out, model(torch.ones(1, 6)))
        with torch.inference_mode(inference), gradsync.consensus(model):
            model(torch.ones(1, 6))
        train(model, optimizer, step + 20)
        with torch.inference_mode(inference):
            handle.wait()
    state = handle.state_dict()
    handle.load_state_dict(state)
    train(model, optimizer, 30)
    handle.wait()
    handle.detach()


@pytest.mark.parametrize("inference", [False, True])
def test_evaluation_sees_averages_whatever_it_calls(world: World, inference: bool) -> None:
    world(2).run(evaluation_sees_averages, inference)


class WithPart(nn.Module):
    """A model with a part that is called by itself, too; only its head's averages may come late in training."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return self.part(x, x, x)[0] if isinstance(self.part, nn.MultiheadAttention) else self.part(x)


class Tied(nn.Module):
    """A part without tensors of its own that reads those of its own parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner[0].weight
        return self.inner(x) if self.training else x @ weight @ weight.T


PARTS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(6, 2, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
    "tied": Tied,
}


def parts_evaluated_at_once(kind: str, early: bool) -> None:
    torch.manual_seed(0)
    model, optimizer, handle = make(WithPart(PARTS[kind]()), early=early)
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(5))
    for step in range(4):
        train(model, optimizer, step, (2, 3, 6))
        model.train(training := kind != "tied" and step % 2 == 1)
        with torch.set_grad_enabled(training):
            features = model.features(x).clone()
            handle.wait()
            assert torch.equal(features, model.features(x)), step
        model.train()
    handle.detach()


@both_ways
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_is_evaluated_right_after_a_step_sees_averages(world: World, kind: str, early: bool) -> None:
    world(2).run(parts_evaluated_at_once, kind, early)


def checkpoints_in_training() -> None:
    """Blocks of a re-entrant checkpoint run without gradients, and yet wait for their own averages only."""
    torch.manual_seed(0)
    model, optimizer, handle = make(Checkpointed(reentrant=True))
    late: list[int] = []
    model.blocks[0][1].register_forward_hook(lambda *_: late.append(len(frontend._sent)))
    frontend = handle._averaging
    for step in range(3):
        optimizer.zero_grad()
        late.clear()
        x = torch.full((2, 6), step + dist.get_rank() + 1.0, requires_grad=True)
        model(x).square().mean().backward()
        assert step < 2 or late[0], "averages of the other block and the head are still under way"
        optimizer.step()
    handle.detach()


def test_a_reentrant_checkpoint_waits_for_its_own_averages_only(world: World) -> None:
    world(2).run(checkpoints_in_training)


def modules_that_prepare_their_weights() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    nn.utils.spectral_norm(layer)  # in a hook before the forward
    model, optimizer, handle = make(nn.Sequential(layer))
    for step in range(3):
        train(model, optimizer, step)
    handle.wait()
    assert same_on_all(layer.weight_orig)
    handle.detach()


def test_hooks_that_prepare_weights_see_averages(world: World) -> None:
    world(2).run(modules_that_prepare_their_weights)


def saved_at_once(order: tuple[int, ...], early: bool) -> None:
    """Saves model, optimiser and handle just after a step, in this order: every state is one after the exchange."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    settings = {"schedule": grid((2, 2)), "momentum_every": 1, "early": early}
    model, optimizer, handle = make(copy.deepcopy(layers), **settings)
    for step in range(2):
        train(model, optimizer, step)
    handle.consensus()
    train(model, optimizer, 2)
    content: dict[int, bytes] = {}
    for place in order:
        stream = io.BytesIO()
        torch.save((model, optimizer, handle)[place].state_dict(), stream)
        content[place] = stream.getvalue()
    for step in range(3, 6):
        train(model, optimizer, step)
    handle.wait()
    handle.detach()
    other, its_optimizer, its_handle = make(layers, **settings)
    for place in order:
        part = (other, its_optimizer, its_handle)[place]
        part.load_state_dict(torch.load(io.BytesIO(content[place]), weights_only=True))
    for step in range(3, 6):
        train(other, its_optimizer, step)
    its_handle.wait()
    its_handle.detach()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(model.buffers(), other.buffers(), strict=True))


@both_ways
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)], ids=["model", "optimizer", "handle"])
def test_what_is_saved_first_just_after_a_step_is_of_after_the_exchange(
    world: World, order: tuple[int, ...], early: bool
) -> None:
    world(4).run(saved_at_once, order, early)


def parts_wait_when_saved() -> None:
    model, optimizer, handle = make()
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    assert all(map(same_on_all, model.layers.state_dict().values()))
    handle.detach()


def test_parts_of_the_model_are_saved_as_averaged(world: World) -> None:
    world(2).run(parts_wait_when_saved)


def rolled_back(early: bool) -> None:
    """Loads an earlier state right after a step, while its exchange goes on."""
    model, optimizer, handle = make(early=early, momentum_every=1)
    for step in range(2):
        train(model, optimizer, step)
    handle.wait()
    saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer)]
    train(model, optimizer, 2)
    handle.wait()
    expected = [p.detach().clone() for p in model.parameters()]
    for turn in range(2):
        train(model, optimizer, 5)
        for part, state in zip((model, optimizer)[:: 1 - 2 * turn], saved[:: 1 - 2 * turn], strict=True):
            part.load_state_dict(copy.deepcopy(state))
        train(model, optimizer, 2)
        handle.wait()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected, strict=True))
    handle.detach()


@both_ways
def test_states_may_be_loaded_while_an_exchange_goes_on(world: World, early: bool) -> None:
    world(2).run(rolled_back, early)


# Unusual steps.


def local_steps(early: bool) -> Tensor:
    model, optimizer, handle = make(early=early, momentum_every=1)
    for step in range(6):
        if step % 3:
            with handle.no_sync():
                train(model, optimizer, step)
        else:
            train(model, optimizer, step)
    handle.wait()
    handle.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def both_step_alike() -> None:
    assert torch.equal(local_steps(early=True), local_steps(early=False))


def test_steps_of_each_ranks_own_are_the_same_early(world: World) -> None:
    world(2).run(both_step_alike)


def a_rank_without_gradients(early: bool) -> Tensor:
    model, optimizer, handle = make(early=early)
    for step in range(3):
        optimizer.zero_grad()
        if dist.get_rank() == 0 or step != 1:
            backward(model, step)
        optimizer.step()
    handle.wait()
    assert all(map(same_on_all, model.parameters()))
    handle.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def nobody_waits_for_ever() -> None:
    assert torch.equal(a_rank_without_gradients(early=True), a_rank_without_gradients(early=False))


def test_a_rank_whose_backward_reaches_nothing_takes_part_early_too(world: World) -> None:
    world(2).run(nobody_waits_for_ever)


def a_closure_computes_gradients() -> None:
    model, optimizer, handle = make()
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((2, 6), step + dist.get_rank() + 1.0)).square().mean()
            loss.backward()
            return loss

        with patch.object(averaging, "logger") as said:
            optimizer.step(closure)
        said.warning.assert_not_called()  # gradients of the step before are no use of the parameters in this one
    handle.wait()
    assert all(map(same_on_all, model.parameters()))
    handle.detach()


def test_steps_with_closures_are_averaged(world: World) -> None:
    world(2).run(a_closure_computes_gradients)


class Wrapped(SGD):
    """An optimiser whose step does something, then calls the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def inherited_steps_count_once() -> int:
    SGD([torch.zeros(1, requires_grad=True)])  # from now on steps of the class above call hooks too
    model, optimizer, handle = make(None, lambda m: Wrapped(m.parameters(), lr=0.1))
    for step in range(3):
        train(model, optimizer, step)
    handle.wait()
    steps = handle.statistics()[0].steps
    handle.detach()
    return steps


def test_a_step_within_a_step_counts_once(world: World) -> None:
    assert world(2).run(inherited_steps_count_once) == [3, 3]


class WithBlocks(nn.Module):
    """Batch normalisation within a checkpointed block, whose forward is repeated in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.block, x, use_reentrant=False))


def repeated_forwards() -> None:
    results = []
    for early in (False, True):
        torch.manual_seed(0)
        model, optimizer, handle = make(WithBlocks(), early=early)
        for step in range(4):
            train(model, optimizer, step)
        handle.consensus()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        handle.detach()
    assert torch.equal(*results)


def test_forwards_that_are_repeated_in_an_early_backward_are_left_alone(world: World) -> None:
    world(2).run(repeated_forwards)


# Refusals.


def what_comes_too_late_for_early_steps() -> list[str]:
    def replaced(model: nn.Module, optimizer: Optimizer) -> None:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5

    def dropped(model: nn.Module, optimizer: Optimizer) -> None:
        model.layers[0].weight.grad = None

    def slowed(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01

    said = []
    for change in (replaced, dropped, slowed):
        model, optimizer, handle = make(early=True)
        train(model, optimizer, 0)
        optimizer.zero_grad()
        backward(model, 1)
        change(model, optimizer)
        said.append(error_of(optimizer.step))
        handle.detach()
    torch.manual_seed(0)
    model, optimizer, handle = make(Checkpointed(reentrant=True), early=True)
    inputs = torch.ones(5, 6, requires_grad=True)
    said.append(error_of(model(inputs).square().mean().backward))
    handle.detach()
    return said


def test_what_comes_too_late_for_early_steps_is_said(world: World) -> None:
    for said in world(2).run(what_comes_too_late_for_early_steps):
        for text, part in zip(said, ["was changed", "was changed", "'lr'", "re-entrant"], strict=True):
            assert part in text, text


def a_step_that_fails() -> None:
    """Checks that a failing step leaves the optimiser unchanged."""
    model, optimizer, handle = make(early=True)
    before = [len(group["params"]) for group in optimizer.param_groups]

    def fail(*_: Any) -> None:
        raise ValueError("of somebody else")

    for _ in range(2):
        train(model, optimizer, 0)
        failing = optimizer.register_step_pre_hook(fail)
        optimizer.zero_grad()
        backward(model, 1)
        assert error_of(optimizer.step) == "of somebody else"
        failing.remove()
        optimizer.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == before
    failing = optimizer.register_step_pre_hook(fail)
    assert error_of(lambda: train(model, optimizer, 2)) == "of somebody else"
    handle.detach()
    assert [len(group["params"]) for group in optimizer.param_groups] == before


def test_a_step_that_fails_leaves_the_optimiser_its_parameters(world: World) -> None:
    world(2).run(a_step_that_fails)


def detached_before_the_step() -> None:
    model, optimizer, handle = make(early=True)
    train(model, optimizer, 0)
    optimizer.zero_grad()
    backward(model, 1)
    handle.wait()
    stepped = [p.detach().clone() for p in model.parameters()]
    handle.detach()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), stepped, strict=True))


def test_detached_between_an_early_backward_and_the_step_nothing_is_stepped_twice(world: World) -> None:
    world(2).run(detached_before_the_step)


def a_scaler_in_the_loop() -> list[str]:
    said = []
    for fused in (False, True):
        model, optimizer, handle = make(None, lambda m, fused=fused: SGD(m.parameters(), lr=0.1, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(2, 6)).square().mean()).backward()
        said.append(error_of(lambda optimizer=optimizer, scaler=scaler: scaler.step(optimizer)))
        handle.detach()
    model, optimizer, handle = make()
    train(model, optimizer, 0)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    backward(model, 1)
    disabled.step(optimizer)
    handle.detach()
    return said


def test_a_grad_scaler_that_attach_was_not_told_of_is_refused(world: World) -> None:
    for said in world(2).run(a_scaler_in_the_loop):
        assert all("GradScaler" in text for text in said)


def a_step_of_one_rank_alone() -> str:
    model, optimizer, handle = make()

    def go() -> None:
        for step in range(4):
            if dist.get_rank() == 0 and step == 1:
                with handle.no_sync():
                    train(model, optimizer, step)
            train(model, optimizer, step)
        handle.wait()

    said = error_of(go)
    handle.detach()
    return said


def test_ranks_that_have_made_other_numbers_of_steps_are_not_averaged(world: World) -> None:
    for said in world(2).run(a_step_of_one_rank_alone):
        assert "out of step" in said


def models_that_change() -> list[str]:
    said = []

    def replace(model: Perceptron) -> None:
        model.layers[0] = nn.Linear(6, 8)

    def add(model: Perceptron) -> None:
        model.layers.append(nn.Linear(3, 3))

    def thaw(model: Perceptron) -> None:
        model.layers[4].requires_grad_(True)

    def assign(model: Perceptron) -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    for change in (replace, add, thaw, assign):
        torch.manual_seed(0)
        model = Perceptron()
        model.layers[4].requires_grad_(False)
        model, optimizer, handle = make(model)
        train(model, optimizer, 0)
        handle.wait()
        change(model)
        said.append(error_of(lambda model=model, optimizer=optimizer: train(model, optimizer, 1)))
        handle.detach()
    return said


def test_parameters_that_nobody_would_average_are_found(world: World) -> None:
    for said in world(2).run(models_that_change):
        for text, part in zip(said, ["came to the model", "came to the model", "frozen", "replaced"], strict=True):
            assert part in text, text


def written_through_data(early: bool) -> str:
    """Writes through `.data` as weight clipping does: found between step and forward, kept after `wait()`."""
    model, optimizer, handle = make(early=early)
    weight = next(model.parameters())
    for step in range(3):
        train(model, optimizer, step)
        handle.wait()
        weight.data.clamp_(-0.01, 0.01)
    train(model, optimizer, 3)
    weight.data.clamp_(-0.001, 0.001)
    said = error_of(lambda: train(model, optimizer, 4))
    handle.detach()
    return said


@pytest.mark.parametrize("early", [False, True])
def test_writes_through_data_during_an_exchange_are_found(world: World, early: bool) -> None:
    assert all("was changed between" in said for said in world(2).run(written_through_data, early))


def weights_elsewhere() -> str:
    model, optimizer, handle = make()
    for step in range(2):
        train(model, optimizer, step)
    kept = {p: torch.zeros_like(p) for p in model.parameters()}
    for p, values in kept.items():
        p.data = values
    said = error_of(lambda: model(torch.ones(1, 6)))
    assert not any(bool(values.any()) for values in kept.values()), "what somebody else keeps"
    handle.detach()
    return said


def test_parameters_that_were_exchanged_for_others_during_an_exchange_are_found(world: World) -> None:
    assert all("was changed between" in said for said in world(2).run(weights_elsewhere))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for p in self.lstm.parameters():
            p.data = p.data.clone()  # as flatten_parameters() does on other devices
        return self.lstm(x)[0]


def weights_that_move() -> None:
    torch.manual_seed(0)
    model, optimizer, handle = make(Recurrent())
    for step in range(3):
        train(model, optimizer, step)
    handle.wait()
    assert all(map(same_on_all, model.parameters()))
    handle.detach()


def test_recurrent_modules_may_move_their_weights(world: World) -> None:
    world(2).run(weights_that_move)


# Checkpoints.


def save_after_a_consensus(settings: Mapping[str, Any]) -> bytes:
    model, optimizer, handle = make(schedule=exact(dist.get_world_size(), 2), **settings)
    for step in range(3):
        train(model, optimizer, step)
    handle.consensus()
    stream = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, handle)], stream)
    handle.detach()
    return stream.getvalue()


def go_on_elsewhere(saved: list[bytes], settings: Mapping[str, Any]) -> list[Tensor]:
    """Loads the optimiser of another rank on ranks that are new."""
    size, rank = dist.get_world_size(), dist.get_rank()
    schedule = exact(size, 2) if size > 1 else together(1)
    model, optimizer, handle = make(schedule=schedule, **settings)
    states = torch.load(io.BytesIO(saved[rank % len(saved)]), weights_only=True)
    for part, state in zip((model, optimizer, handle), states, strict=True):
        part.load_state_dict(state)
    started = [p.detach().clone() for p in model.parameters()]
    assert all(map(same_on_all, started))
    assert handle.state_dict()["step"] == 3
    for step in range(3, 6):
        train(model, optimizer, step)
    handle.consensus()
    assert all(map(same_on_all, model.parameters()))
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), started, strict=True))
    handle.detach()
    return started


@pytest.mark.parametrize("settings", [{}, {"early": True, "momentum_every": 2, "compressor": Cast("bfloat16")}])
@pytest.mark.parametrize(("before", "size"), [(4, 1), (4, 3), (2, 4)])
def test_a_consensus_checkpoint_goes_on_with_other_numbers_of_ranks(
    world: World, before: int, size: int, settings: dict[str, Any]
) -> None:
    saved = world(before).run(save_after_a_consensus, settings)
    world(size).run(go_on_elsewhere, saved, settings)


def save_in_a_cycle() -> bytes:
    model, optimizer, handle = make(schedule=exact(dist.get_world_size(), 2))
    train(model, optimizer, 0)
    stream = io.BytesIO()
    torch.save(handle.state_dict(), stream)
    handle.detach()
    return stream.getvalue()


def refuse_elsewhere(saved: list[bytes]) -> None:
    model, optimizer, handle = make(schedule=together(2))
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.load(io.BytesIO(saved[dist.get_rank()]), weights_only=True)
    with pytest.raises(
        (ValueError, RuntimeError), match="one rank's, of 3 whose models were apart, and now there are 2"
    ):
        handle.load_state_dict(state)
    assert all(map(torch.equal, before, model.parameters()))
    assert handle.state_dict()["step"] == 0
    good = handle.state_dict()
    told = "rank 1 could not: the state's 'apart' must be a number of ranks" if not dist.get_rank() else "'apart' must"
    with pytest.raises((ValueError, RuntimeError), match=told):
        handle.load_state_dict({**good, "apart": "all"} if dist.get_rank() else good)
    handle.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True), strict=False)
    train(model, optimizer, 1)
    handle.consensus()
    assert all(map(same_on_all, model.parameters()))
    handle.detach()


def refuse_for_gradients(saved: list[bytes]) -> None:
    handle = gradsync.attach(Perceptron(), timeout=10)
    state = torch.load(io.BytesIO(saved[dist.get_rank()]), weights_only=True)
    with pytest.raises((ValueError, RuntimeError), match="whose models were apart, and now gradients are averaged"):
        handle.load_state_dict(state)
    handle.detach()


def refuse_another_ranks(saved: list[bytes]) -> None:
    """Gives all ranks the state of rank 0, as a script does in which one rank writes, and all read."""
    model, _, handle = make(schedule=exact(dist.get_world_size(), 2))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((ValueError, RuntimeError), match="this checkpoint is rank 0's, of 3 whose models were apart"):
        handle.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
    assert all(map(torch.equal, before, model.parameters()))
    handle.load_state_dict(torch.load(io.BytesIO(saved[dist.get_rank()]), weights_only=True))
    handle.detach()


def test_one_ranks_checkpoint_is_refused_on_the_others_if_models_were_apart(world: World) -> None:
    ranks = world(3)
    ranks.run(refuse_another_ranks, ranks.run(save_in_a_cycle))


def tiny_second_moments() -> tuple[Tensor, Tensor]:
    """Averages momenta in 16 bits whose second moments are subnormal there; returns these and the weights."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = Adam(model.parameters(), lr=1e-3)
    handle = gradsync.attach(model, optimizer, AveragingPlanner(schedule=together(4), momentum_every=1), timeout=10)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.zeros(1, 4)
        x[0, 0] = 1
        if step == 0 and dist.get_rank() == 0:
            x[0, 1] = 4.4e-19
        model(x).sum().backward()
        optimizer.step()
        handle.wait()
    seen = optimizer.state[model.weight]["exp_avg_sq"].clone(), model.weight.detach().clone()
    handle.detach()
    return seen


def test_rounding_makes_no_second_moment_negative(world: World) -> None:
    for moments, weights in world(4).run(tiny_second_moments):
        assert (moments >= 0).all() and weights.isfinite().all()


class LosesRanks(LocalGroup):
    """A group whose first sum fails."""

    def all_reduce(self, x: Tensor) -> Any:
        raise GroupError("rank 1 was lost", [1])


def test_values_stay_as_they_were_where_a_consensus_fails() -> None:
    weight = nn.Parameter(torch.ones(3))
    group = LosesRanks.world(2)[0]
    with pytest.raises(GroupError, match="rank 1 was lost"), torch.no_grad():
        mean_model._average(group, [weight], 1.0)
    assert torch.equal(weight, torch.ones(3))


def test_one_ranks_checkpoint_is_refused_with_other_numbers_of_ranks(world: World) -> None:
    saved = world(3).run(save_in_a_cycle)
    world(2).run(refuse_elsewhere, saved)
    world(3).run(refuse_for_gradients, saved)


def go_on_alone_or_exactly(saved: list[bytes]) -> bytes:
    """Checks that models of one rank, and of ranks that all average exactly, are not apart."""
    size = dist.get_world_size()
    model = Perceptron()
    specs = {n: TensorSpec.of(p) for n, p in model.named_parameters()}
    plan = Plan.make(specs, size, [(list(specs), AllReduce())], what=What.PARAMETER)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, optimizer, plan, timeout=10)
    if saved:
        handle.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
    train(model, optimizer, 0)
    with handle.no_sync():
        train(model, optimizer, 1)
    assert handle.state_dict()["apart"] == (size if size > 1 else 0)
    train(model, optimizer, 2)
    assert handle.state_dict()["apart"] == 0
    stream = io.BytesIO()
    torch.save(handle.state_dict(), stream)
    handle.detach()
    return stream.getvalue()


def test_ranks_whose_models_are_one_go_on_with_others(world: World) -> None:
    saved = world(1).run(go_on_alone_or_exactly, [])
    saved = world(2).run(go_on_alone_or_exactly, saved)
    world(1).run(go_on_alone_or_exactly, saved)


def furthest_of(model: nn.Module) -> float:
    """Returns the largest distance of a rank's parameters from their mean."""
    return max(float((p - mean_over_ranks(p)).detach().abs().max()) for p in model.parameters() if p.numel())


def rounded_from_common_values() -> None:
    """Loads unrounded models under a plan that rounds, and trains with a learning rate of zero."""
    model, optimizer, handle = make(schedule=grid((2, 2)))
    for step in range(3):
        train(model, optimizer, step)
    saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, handle)])
    handle.detach()
    model, optimizer, handle = make(schedule=grid((2, 2)), compressor=Cast("bfloat16"))
    for part, state in zip((model, optimizer, handle), saved, strict=True):
        part.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    apart = furthest_of(model)
    for step in range(4):
        train(model, optimizer, step)
    handle.wait()
    assert furthest_of(model) < 0.05 * apart
    handle.detach()


def test_ranks_that_go_on_rounded_come_together(world: World) -> None:
    world(4).run(rounded_from_common_values)


# Attaching, failing and detaching.


def copies_are_free() -> None:
    model, optimizer, handle = make(early=True, momentum_every=1)
    train(model, optimizer, 0)
    other = copy.deepcopy(model)
    its_optimizer = momentum_sgd(other)
    if dist.get_rank() == 0:  # what nobody waits for
        train(other, its_optimizer, 1)
    other.load_state_dict(model.state_dict())
    copy.deepcopy(optimizer)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    read = torch.load(stream, weights_only=False)
    read.load_state_dict(read.state_dict())
    handle.detach()
    train(model, optimizer, 2)


def test_copies_of_the_model_are_free(world: World) -> None:
    world(2).run(copies_are_free)


def nothing_lives_on() -> None:
    model, optimizer, handle = make(early=True, momentum_every=1)
    train(model, optimizer, 0)
    gone = [weakref.ref(model), weakref.ref(model.scale), weakref.ref(handle._averaging)]
    handle.wait()
    dist.barrier()
    del model, optimizer, handle
    gc.collect()
    assert not any(each() for each in gone)


def the_inside_of_a_wrapper_that_is_gone() -> None:
    """Trains two rounds of pairs of four ranks without the wrapper; the third step leaves the ranks apart."""
    torch.manual_seed(0)
    inside = Perceptron()
    wrapper = nn.Sequential(inside)
    optimizer = SGD(wrapper.parameters(), lr=0.1)
    handle = gradsync.attach(wrapper, optimizer, AveragingPlanner(schedule=grid((2, 2))), timeout=10)
    del wrapper
    gc.collect()
    for number in range(3):
        train(inside, optimizer, number)
    handle.wait()
    weight = next(inside.parameters())
    assert not same_on_all(weight)
    expected = mean_over_ranks(weight)
    handle.consensus()
    torch.testing.assert_close(weight.detach(), expected)
    assert same_on_all(weight)
    handle.detach()


def test_a_consensus_is_made_of_parameters_whose_attached_module_is_gone(world: World) -> None:
    world(4).run(the_inside_of_a_wrapper_that_is_gone)


def test_a_model_that_is_dropped_takes_its_averaging_along(world: World) -> None:
    world(2).run(nothing_lives_on)


class Table(nn.Module):
    """A model whose table has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


def steps_by(make_optimizer: Callable[[nn.Module], Optimizer], sparse: bool, early: bool) -> Tensor:
    torch.manual_seed(0)
    model, optimizer, handle = make(Table() if sparse else TiedTable(sparse=False), make_optimizer, early=early)
    for step in range(4):
        optimizer.zero_grad()
        ids = torch.randint(12, (4, 3), generator=torch.Generator().manual_seed(step + dist.get_rank()))
        model(ids).square().mean().backward()
        optimizer.step()
    handle.wait()
    handle.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def optimizers_step_alike_early() -> None:
    for sparse, optimizer_of in (
        (True, lambda m: SGD(m.parameters(), lr=0.1)),
        (False, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True)),
        (False, lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False)),
        (False, lambda m: AdamW(m.parameters(), lr=0.01, foreach=True, amsgrad=True)),
        (False, lambda m: AdamW(m.parameters(), lr=0.01, fused=True)),
        (False, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01)),
        (False, lambda m: torch.optim.NAdam(m.parameters(), lr=0.01)),
    ):
        assert torch.equal(steps_by(optimizer_of, sparse, True), steps_by(optimizer_of, sparse, False))


def test_optimizers_step_alike_early(world: World) -> None:
    world(2).run(optimizers_step_alike_early)


def backward_fails(early: bool) -> list[str]:
    model, optimizer, handle = make(early=early)
    train(model, optimizer, 0)
    out = model(torch.ones(2, 6))

    def fail(_: Tensor) -> None:
        raise ValueError("of a hook")

    failing = model.layers[2].weight.register_hook(fail)
    said = [error_of(out.square().mean().backward)]
    failing.remove()
    said.append(error_of(lambda: train(model, optimizer, 1)))
    said.append(error_of(handle.detach))
    assert len(optimizer.param_groups[0]["params"]) == 8
    said.append(error_of(lambda: train(model, optimizer, 2)))
    return said


@both_ways
def test_a_backward_that_fails_is_said_and_can_be_left(world: World, early: bool) -> None:
    for said in world(2).run(backward_fails, early):
        assert said[0] == "of a hook"
        assert ("backward ended with an error" in said[1]) is early, said
        assert said[2:] == ["", ""]


def another_optimizer_steps_the_rest() -> None:
    model, optimizer, handle = make(None, lambda m: SGD(m.layers[0].parameters(), lr=0.1))
    other = SGD(model.layers[2].parameters(), lr=0.1)
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        other.step()
        optimizer.step()
    handle.wait()
    assert all(map(same_on_all, model.parameters()))
    handle.detach()


def test_what_another_optimizer_steps_before_is_averaged_too(world: World) -> None:
    world(2).run(another_optimizer_steps_the_rest)


def nothing_to_average() -> None:
    model = Perceptron()
    optimizer = momentum_sgd(model)
    handle = gradsync.attach(model, optimizer, AveragingPlanner(schedule=together(2)), timeout=10, exclude=["*"])
    for step in range(3):
        train(model, optimizer, step)
    handle.wait()
    handle.consensus()
    handle.load_state_dict(handle.state_dict())
    train(model, optimizer, 3)
    handle.detach()


def test_a_model_without_anything_to_average_trains(world: World) -> None:
    world(2).run(nothing_to_average)


class TwoWays(nn.Module):
    """A module with a parameter of its own and a method beside forward that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x)

    def other(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def ways_that_no_hook_sees(early: bool) -> None:
    torch.manual_seed(0)
    model, optimizer, handle = make(TwoWays(), early=early)
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    for step in range(2, 5):
        optimizer.zero_grad()
        model.other(torch.full((2, 6), step + dist.get_rank() + 1.0)).square().mean().backward()
        optimizer.step()
        assert step == 2 or same_on_all(model.scale), "the step waits"
    handle.detach()


@both_ways
def test_uses_that_no_hook_sees_are_noticed_and_waited_for_from_then_on(world: World, early: bool) -> None:
    world(2).run(ways_that_no_hook_sees, early)


def compiled_models_train_alike() -> None:
    results = []
    for compiles, early in ((False, False), (True, False), (True, True)):
        model, optimizer, handle = make(early=early)
        ways_in = torch.compile(model, backend="eager") if compiles else model
        for step in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # dynamo looks at gradients of what goes on behind a hook
                train(ways_in, optimizer, step)
        assert all(map(same_on_all, ways_in.state_dict().values()))
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        handle.detach()
    for theirs in results[1:]:
        torch.testing.assert_close(results[0], theirs)


def test_compiled_models_train_as_others(world: World) -> None:
    world(2).run(compiled_models_train_alike)


def exported_on_one_rank(early: bool, exports: bool) -> Tensor:
    """Returns the parameters after some steps; if `exports`, rank 0 exports the model and a part between them."""
    model, optimizer, handle = make(early=early)
    for step in range(4):
        train(model, optimizer, step)
        if exports and step > 0 and dist.get_rank() == 0:
            for module in (model, model.layers):
                torch.export.export(module, (torch.ones(5, 6),))
    handle.wait()
    handle.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def exports_change_nothing(early: bool) -> None:
    alone, beside = (exported_on_one_rank(early, exports) for exports in (False, True))
    assert torch.equal(alone, beside)


@both_ways
def test_an_export_on_one_rank_between_steps_changes_nothing(world: World, early: bool) -> None:
    world(2).run(exports_change_nothing, early)


def cut_and_by_two_schedules(what: What) -> Tensor:
    """Averages a parameter whose halves lie in two buckets with different schedules."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = momentum_sgd(model)
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    cut = "layers.2.weight"
    rest = [(name, 0, spec.numel) for name, spec in specs.items() if name != cut]
    buckets = [
        ([rest[-1], (cut, 0, 30)], Shuffled.by(grid((2, 2)))),
        ([(cut, 30, 64), *rest[:-1]], Shuffled.by(exact(4, 3))),
    ]
    handle = gradsync.attach(model, optimizer, Plan.make(specs, 4, buckets, what=what), timeout=10)
    for step in range(5):
        train(model, optimizer, step)
    handle.detach()  # right after a step
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def both_cut_alike() -> None:
    assert torch.equal(cut_and_by_two_schedules(What.PARAMETER), cut_and_by_two_schedules(What.EARLY_PARAMETER))


def test_cut_parameters_are_stepped_once_early(world: World) -> None:
    world(4).run(both_cut_alike)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def write_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)


def write_through_numpy(model: nn.Module) -> None:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.numpy()[...] = 0


def one_rank_changes_gradients(change: Callable[[nn.Module], None]) -> str:
    model, optimizer, handle = make(early=True)

    def go() -> None:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            if dist.get_rank() == 1:
                change(model)
            optimizer.step()

    said = error_of(go)
    handle.detach()
    return said


@pytest.mark.parametrize("change", [clip, write_through_data, write_through_numpy])
def test_what_one_rank_does_too_late_stops_all_with_its_reason(
    world: World, change: Callable[[nn.Module], None]
) -> None:
    for said in world(2).run(one_rank_changes_gradients, change):
        assert "was changed between backward and optimizer.step()" in said


def per_sample_gradients(early: bool) -> None:
    """Calls `vmap(grad(...))` while averages are under way, which arrive all the same."""
    model, optimizer, handle = make(early=early)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        values = {name: p.detach().clone() for name, p in model.named_parameters()}

        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, values, (x[None],)).square().mean()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, torch.randn(4, 6))
        assert all(len(gradient) == 4 for gradient in gradients.values())
        handle.wait()
        assert_alike(model)
    handle.detach()


def assert_alike(model: nn.Module) -> None:
    alike = [torch.zeros_like(p) for p in model.parameters()]
    for ours, theirs in zip(model.parameters(), alike, strict=True):
        theirs.copy_(ours.detach())
        dist.broadcast(theirs, 0)
        assert torch.equal(ours, theirs)


@both_ways
def test_transforms_of_torch_func_get_averages(world: World, early: bool) -> None:
    world(2).run(per_sample_gradients, early)


def interrupted_in_step() -> list[str]:
    model, optimizer, handle = make()
    rank, send, said = dist.get_rank(), averaging.Averaging._send, list[str]()

    def interrupted(self: averaging.Averaging, name: str) -> None:
        send(self, name)
        if rank == 0 and self.steps == 2:
            raise KeyboardInterrupt

    def train(step: int) -> None:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()

    with patch.object(averaging.Averaging, "_send", interrupted):
        for step in range(3):
            try:
                train(step)
            except (KeyboardInterrupt, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    handle.detach()
    return said


def test_an_interruption_of_a_step_stops_all_with_its_reason(world: World) -> None:
    first, second = world(2).run(interrupted_in_step)
    assert first[0].startswith("KeyboardInterrupt")
    for said in (first[1], second[0]):
        assert "averages of step 1: KeyboardInterrupt" in said
