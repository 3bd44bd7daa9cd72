"""The guard: all ranks find models that differ at the next comparison, and nothing else is reported."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import gradsync
from gradsync import Plan
from gradsync.comm.shuffle import together, with_local_steps
from gradsync.engine import guard
from gradsync.frontends import averaging
from gradsync.plans.plan import What
from gradsync.schemes import AllReduce, Shuffled
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.frontends.models import MixedPrecision, Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]
Change = Callable[[nn.Module, Optimizer], None]

TIMEOUT_S = 10
WEIGHT = "layers.2.weight"


def plan_of(model: nn.Module) -> Plan:
    """Returns a plan with one bucket for each dtype, settled from the start."""
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    dtypes = dict.fromkeys(spec.dtype for spec in specs.values())
    groups = [([n for n, spec in specs.items() if spec.dtype is dtype], AllReduce()) for dtype in dtypes]
    return Plan.make(specs, dist.get_world_size(), groups)


def attached(
    make: Callable[[], nn.Module] = Perceptron, *, ddp: bool = False, **settings: Any
) -> tuple[nn.Module, SGD, gradsync.Attachment]:
    torch.manual_seed(dist.get_rank())
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    plan = settings.pop("plan", plan_of(model))
    model = DistributedDataParallel(model) if ddp else model
    return model, optimizer, gradsync.attach(model, plan=plan, timeout=TIMEOUT_S, **settings)


def train(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(5, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def raised_at(model: nn.Module, optimizer: Optimizer, change: Change, *, change_at: int, steps: int) -> tuple[int, str]:
    """Trains with `change` on rank 1 before step `change_at`; returns the step that raised (-1: none) and its error."""
    for number in range(steps):
        if number == change_at and dist.get_rank() == 1:
            change(model, optimizer)
        try:
            train(model, optimizer, number)
        except RuntimeError as error:
            ddp = isinstance(model, DistributedDataParallel)  # which has words of its own after an error
            with pytest.raises(RuntimeError, match=None if ddp else "stopped earlier"):
                train(model, optimizer, number)
            return number, str(error)
    return -1, ""


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


@torch.no_grad()
def write(model: nn.Module, optimizer: Optimizer) -> None:
    inner(model).get_parameter(WEIGHT).data[3, 4] = 5.0


@torch.no_grad()
def swap(model: nn.Module, optimizer: Optimizer) -> None:
    weight = inner(model).get_parameter(WEIGHT)
    weight[[0, 1]] = weight[[1, 0]]


def initialise(model: nn.Module, optimizer: Optimizer) -> None:
    torch.manual_seed(7)
    inner(model).layers[2].reset_parameters()


def step_alone(model: nn.Module, optimizer: Optimizer) -> None:
    """Steps again by the last gradients: no backward of this rank announces the step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data -= 0.1 * p.grad


def learn_faster(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.3


@torch.no_grad()
def write_a_little(model: nn.Module, optimizer: Optimizer) -> None:
    """Changes a weight by 1e-5 of the largest magnitude."""
    weight = inner(model).get_parameter(WEIGHT)
    weight[0, 0] += 1e-5 * float(weight.abs().max())


CHANGES: dict[str, Change] = {
    change.__name__: change for change in (write, swap, initialise, step_alone, learn_faster, write_a_little)
}


def found(change: str, every: int, settings: dict[str, Any]) -> tuple[int, str]:
    model, optimizer, handle = attached(verify_every=every, **settings)
    outcome = raised_at(model, optimizer, CHANGES[change], change_at=5, steps=14)
    handle.detach()
    return outcome


@pytest.mark.parametrize("ddp", [False, True], ids=["attach", "ddp"])
@pytest.mark.parametrize("change", ["write", "swap", "initialise", "step_alone", "learn_faster"])
def test_a_model_that_drifts_apart_is_found_at_the_next_comparison_by_all_ranks(
    world: World, change: str, ddp: bool
) -> None:
    """Steps 1, 5, 9, ... compare: the change comes before step 5 and lasts. A changed learning rate shows later."""
    outcomes = world(3).run(found, change, 4, {"ddp": ddp})
    assert len(set(outcomes)) == 1, "on all ranks alike"
    step, text = outcomes[0]
    assert step == (9 if change == "learn_faster" else 6), text
    assert f"at step {step}, the ranks' models have drifted apart" in text
    first = WEIGHT if change in ("write", "swap", "initialise") else "scale"
    assert f"{first!r} differs between ranks 0, 2 and rank 1" in text
    assert "more than verify_tolerance=0.001" in text


def raised_with_several_backwards(backwards: int, ddp: bool) -> str:
    """Trains with several synchronised backwards in each step, and a write on rank 1; returns the error."""
    model, optimizer, _ = attached(ddp=ddp, verify_every=12)
    for number in range(15):
        if number == 3 and dist.get_rank() == 1:
            write(model, optimizer)
        optimizer.zero_grad()
        try:
            for part in range(backwards):
                generator = torch.Generator().manual_seed(100 * number + 10 * part + dist.get_rank())
                model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        except RuntimeError as error:
            return str(error)
        optimizer.step()
    return ""


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("backwards", [2, 3])
def test_a_drift_is_found_with_several_backwards_in_a_step(world: World, backwards: int, ddp: bool) -> None:
    for error in world(2).run(raised_with_several_backwards, backwards, ddp):
        assert f"drifted apart: '{WEIGHT}' differs" in error


@pytest.mark.parametrize("change", ["write", "initialise"])
def test_a_comparison_that_never_comes_finds_nothing(world: World, change: str) -> None:
    """No error comes without the guard: it alone finds the differences of the tests above."""
    assert world(2).run(found, change, 0, {}) == [(-1, "")] * 2


def found_by(settings: dict[str, Any], steps: int) -> tuple[tuple[int, str], list[str]]:
    with warnings_of_the_guard() as told:
        model, optimizer, handle = attached(verify_every=1, **settings)
        outcome = raised_at(model, optimizer, write_a_little, change_at=3, steps=steps)
        handle.detach()
    return outcome, told


@contextmanager
def warnings_of_the_guard() -> Iterator[list[str]]:
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                told.append(record.getMessage())

    listener = Listener()
    guard.logger.addHandler(listener)
    try:
        yield told
    finally:
        guard.logger.removeHandler(listener)


@pytest.mark.parametrize("tolerance", [None, 1e-4, math.inf])
def test_a_difference_within_the_tolerance_is_one_warning(world: World, tolerance: float | None) -> None:
    for (step, text), told in world(2).run(found_by, {"verify_tolerance": tolerance}, 12):
        assert step == -1, text
        assert len(told) == 1, told
        assert f"at step 4, the ranks' models have drifted apart: {WEIGHT!r} differs" in told[0]
        assert "Likely causes" in told[0] and "difference is 1" in told[0] and "e-05, within" in told[0], told[0]


def test_a_difference_beyond_the_tolerance_is_an_error(world: World) -> None:
    for tolerance in (0, 0.0, 1e-6):
        for (step, text), told in world(2).run(found_by, {"verify_tolerance": tolerance}, 12):
            assert (step, told) == (4, []) and f"more than verify_tolerance={tolerance:.3g}" in text


def levelled() -> list[str]:
    """Makes models differ by a learning rate for each rank, then loads a checkpoint: they agree again."""
    with warnings_of_the_guard() as warnings:
        model, optimizer, handle = attached(verify_every=1)
        for number in range(4):
            if number == 2:
                saved = {name: values.clone() for name, values in model.state_dict().items()}
                optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
            train(model, optimizer, number)
            optimizer.param_groups[0]["lr"] = 0.1
            if number == 2:
                model.load_state_dict(saved)
        handle.detach()
        return warnings


def test_models_that_were_made_the_same_again_have_not_drifted(world: World) -> None:
    assert world(2).run(levelled) == [[], []]


def growing() -> tuple[int, list[str]]:
    """Makes rank 1's scale drift by 1e-6, and by half as much again in each step; returns the warnings."""
    with warnings_of_the_guard() as told:
        model, optimizer, handle = attached(verify_every=1)
        for number in range(14):
            train(model, optimizer, number)
            if dist.get_rank() == 1:
                model.scale.data += 1e-6 * 1.5**number
        handle.detach()
    return len(told), told


def test_a_difference_that_grows_is_told_again_when_it_has_doubled(world: World) -> None:
    for count, told in world(2).run(growing):
        assert 4 <= count <= 9, told


def alike_but_for_bits() -> None:
    """Gives rank 1 NaNs with other bits and zeros of the other sign; rank 0's next gradients leave them unchanged."""
    model, optimizer, handle = attached(verify_every=1)
    for number in range(6):
        if number == 2:
            with torch.no_grad():
                model.layers[4].bias[0] = 0.0 if dist.get_rank() == 0 else -0.0
                bits = model.layers[4].bias.view(torch.int32)
                bits[1] = 0x7FC00000 if dist.get_rank() == 0 else -1
            optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, number)
    assert model.layers[4].bias[1].isnan()
    handle.detach()


def test_nans_and_zeros_are_alike_whatever_their_bits(world: World) -> None:
    world(2).run(alike_but_for_bits)


def counted(every: int, tried: bool) -> tuple[list[int], list[bool]]:
    """Returns for each step the group's operations beside the buckets', and whether the plan was settled before."""
    model, optimizer, handle = attached(verify_every=every, plan=tries if tried else plan_of(Perceptron()))
    group, counts, settled = handle._engine.group, [], []
    for number in range(120 if tried else 9):  # a trial may take 90 steps
        settled.append(handle.settled)
        before, buckets = group._whereabouts.issued, len(handle.plan.buckets)
        train(model, optimizer, number)
        counts.append(group._whereabouts.issued - before - buckets)
    for bucket in handle.statistics():
        assert bucket.sent_bytes == bucket.predicted_bytes
    handle.detach()
    return counts, settled


def tries(profiles: Any, size: int) -> list[Plan]:
    """Returns a planner with two plans for a trial."""
    specs = {profile.name: profile.tensor for profile in profiles}
    halves = [list(specs)[:3], list(specs)[3:]]
    return [Plan.make(specs, size, [(names, AllReduce()) for names in groups]) for groups in ([list(specs)], halves)]


def test_a_comparison_is_one_more_operation_and_none_is_none(world: World) -> None:
    without, every_third, rare = (world(2).run(counted, every, False)[0][0] for every in (0, 3, 1000))
    more = [a - b for a, b in zip(every_third, without, strict=True)]
    assert more == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert [a - b for a, b in zip(rare, without, strict=True)] == [0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_the_first_comparison_follows_when_the_plan_has_settled(world: World) -> None:
    """A comparison during a trial would add to the measured time of a step."""
    counts, settled = world(2).run(counted, 1, True)[0]
    first = settled.index(True)
    assert first > 4
    assert set(counts[first:]) == {1}
    assert counts[:first].count(0) > 4, "what is tried runs as it would without"


def default_finds() -> str:
    model, optimizer, handle = attached(plan=None)
    try:
        train(model, optimizer, 0)
        if dist.get_rank() == 1:
            write(model, optimizer)
        with pytest.raises(RuntimeError, match="drifted apart") as caught:
            for number in range(1, 5):
                train(model, optimizer, number)
    finally:
        handle.detach()
    return str(caught.value)


def test_it_is_on_by_default(world: World) -> None:
    assert all(WEIGHT in text for text in world(2).run(default_finds))


def last_places() -> list[str]:
    """Makes the largest bfloat16 weight differ by one unit in the last place, about half a per cent."""
    with warnings_of_the_guard() as told:
        model, optimizer, handle = attached(MixedPrecision, verify_every=1)
        for number in range(6):
            if number == 4 and dist.get_rank() == 1:
                with torch.no_grad():
                    weight = model.third.weight
                    weight.view(-1).view(torch.int16)[weight.abs().argmax()] += 1
            train(model, optimizer, number)
        handle.detach()
    return told


def test_a_unit_in_the_last_place_of_bfloat16_is_no_error(world: World) -> None:
    for told in world(2).run(last_places):
        assert len(told) == 1 and "'third.weight' differs between rank 0 and rank 1" in told[0], told
        assert "is 0.00" in told[0] and "within verify_tolerance=0.0312" in told[0], told


def local_steps(own: bool, averages: bool) -> None:
    """Runs local SGD by hand behind DDP: local steps, then an average by hand, which may be left out."""
    model, optimizer, handle = attached(verify_every=2, ddp=True)
    with warnings_of_the_guard() as told:
        for number in range(4):
            train(model, optimizer, number)
        if own:
            for number in range(4, 7):
                with model.no_sync():
                    train(model, optimizer, number)
        else:
            handle._engine.stepped_alone = dist.get_rank() == 1
            if dist.get_rank() == 1:
                write(model, optimizer)
        if averages:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()
            for number in range(12, 18):
                train(model, optimizer, number)
            assert torch.equal(*everyones(model)) and not told
            if dist.get_rank() == 1:
                write(model, optimizer)
        else:
            train(model, optimizer, 7)  # whether this one compares or the next: a rank has stepped alone
            assert not torch.equal(*everyones(model)) and not told
        with pytest.raises(RuntimeError, match="drifted apart"):
            for number in range(18, 22):
                train(model, optimizer, number)
    handle.detach()


def everyones(model: nn.Module) -> list[torch.Tensor]:
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)
    return parts


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("own", [True, False], ids=["no_sync", "told by the frontend"])
def test_ranks_that_step_alone_may_differ_until_the_next_comparison(world: World, own: bool, averages: bool) -> None:
    world(2).run(local_steps, own, averages)


def closures() -> None:
    """Steps with a closure, whose backward runs within the step: not a step without a backward."""

    class Outer(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model, _, handle = attached(verify_every=1, ddp=True)
    optimizer = Outer(model.parameters(), lr=0.1)
    for number in range(4):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            loss = model(torch.randn(5, 6, generator=generator)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure) if number % 2 else (closure(), optimizer.step())
        assert not handle._engine.stepped_alone
    optimizer.step()
    assert handle._engine.stepped_alone
    handle.detach()


def test_behind_ddp_a_step_alone_is_one_without_a_backward_since_the_last(world: World) -> None:
    world(2).run(closures)


def late(steps: int) -> None:
    """Lets rank 1's backward reach no parameter in a step that compares."""
    model, optimizer, handle = attached(verify_every=1)
    for number in range(steps):
        optimizer.zero_grad()
        output = model(torch.ones(2, 6)).mean()
        loss = torch.ones(1, requires_grad=True).sum() if number == 2 and dist.get_rank() == 1 else output
        loss.backward()
        optimizer.step()
    handle.detach()


def test_a_rank_that_joins_at_the_step_compares_with_the_others(world: World) -> None:
    world(2).run(late, 5)


def consensus(every: int, change: bool) -> tuple[str, bool]:
    """Checks a plan of parameters: models differ between consensuses and must agree at each."""
    torch.manual_seed(dist.get_rank())
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    scheme = Shuffled.by(with_local_steps(together(2), 3))
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), scheme)], what=What.PARAMETER)
    handle = gradsync.attach(model, optimizer, plan, timeout=TIMEOUT_S, verify_every=every)
    for number in range(4):
        train(model, optimizer, number)
    handle.wait()
    assert not torch.equal(*everyones(model))
    handle.consensus()
    train(model, optimizer, 4)
    original = averaging.take_mean

    def faulty(*arguments: Any) -> None:
        original(*arguments)
        if dist.get_rank() == 1:
            write(model, optimizer)

    text = ""
    if change:
        averaging.take_mean = faulty
    try:
        handle.consensus()
    except RuntimeError as error:
        text = str(error)
    finally:
        averaging.take_mean = original
    return text, text == "" and torch.equal(*everyones(model))


def test_plans_of_parameters_are_compared_at_a_consensus(world: World) -> None:
    for text, _ in world(2).run(consensus, 1000, True):
        assert f"at the consensus, the ranks' models have drifted apart: {WEIGHT!r} differs" in text
    assert world(2).run(consensus, 1, False) == [("", True)] * 2
    assert world(2).run(consensus, 0, True) == [("", False)] * 2


def other_shapes() -> str:
    model, _, handle = attached(verify_every=1)
    if dist.get_rank() == 1:
        model.get_parameter(WEIGHT).data = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="is inf") as caught:
        handle._engine.verify(trainable_parameters(model))
    handle.detach()
    return str(caught.value)


def test_parameters_that_have_other_shapes_by_now_are_no_message_of_another_length(world: World) -> None:
    assert all(f"{WEIGHT!r} differs" in text for text in world(2).run(other_shapes))


def perturbed(way: str) -> None:
    """Moves each rank's weights while gradients are made, as SAM by the rank's batch does, and restores them."""
    model, optimizer, handle = attached(verify_every=1, ddp=way == "ddp")
    own = torch.Generator().manual_seed(dist.get_rank())
    for number in range(6):
        noise = [torch.randn(p.shape, generator=own) * 0.1 for p in model.parameters()]
        with torch.no_grad():
            for p, moved in zip(model.parameters(), noise, strict=True):
                p.add_(moved)
        optimizer.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        model(torch.randn(5, 6)).square().mean().backward()
        with torch.no_grad():
            for p, moved in zip(model.parameters(), noise, strict=True):
                p.sub_(moved)
        for p in model.parameters():  # rounding left them apart by last bits
            dist.broadcast(p.data, src=0)
        optimizer.step()
    handle.detach()


@pytest.mark.parametrize("way", ["attach", "ddp"])
def test_weights_that_are_perturbed_for_a_backward_are_no_drift(world: World, way: str) -> None:
    world(2).run(perturbed, way)


def accumulated_with_closures(ddp: bool) -> str:
    """Accumulates over 2 with the last backward inside of `step(closure)`, as Lightning; rank 1 changes a weight."""
    model, optimizer, handle = attached(verify_every=1, ddp=ddp)
    said = ""
    for number in range(6):
        if number == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                inner(model).get_parameter(WEIGHT).add_(0.1)

        def backward(number: int, part: int) -> None:
            generator = torch.Generator().manual_seed(100 * number + 10 * part + dist.get_rank())
            model(torch.randn(5, 6, generator=generator)).square().mean().backward()

        def closure(number: int = number) -> None:
            backward(number, 1)

        optimizer.zero_grad()
        try:
            with handle.no_sync():
                backward(number, 0)
            optimizer.step(closure)  # type: ignore[arg-type]  # a closure may return nothing
        except RuntimeError as error:
            said = str(error)
            break
    handle.detach()
    return said


@pytest.mark.parametrize("ddp", [False, True])
def test_models_that_differ_are_found_where_backward_is_in_a_closure(world: World, ddp: bool) -> None:
    """A closure's backward comes after the step has begun: gradients of before it are no sign of a step alone."""
    for said in world(2).run(accumulated_with_closures, ddp):
        assert WEIGHT in said and "differ" in said, said
