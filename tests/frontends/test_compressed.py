"""Plans with compressors in the engine: residuals belong to parameters, through checkpoints and other plans."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.compressors import ErrorFeedback, MomentumCorrection, Sign, Signum, TopK, Warmup
from gradsync.costs.steps import FINISH
from gradsync.engine.trial import RUN_OFF_ROUNDS, TURN_STEPS
from gradsync.planner import CompressingPlanner
from gradsync.schemes import (
    AllReduce,
    CoarseGrained,
    CompressedAllGather,
    CompressedTwoWay,
    HalfPrecision,
    MajorityVote,
    PowerSGD,
    Scheme,
    Sparsified,
    ways,
)
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.compressors.family import MEMBERS
from tests.frontends.conservation import left_to_send
from tests.frontends.models import Perceptron
from tests.frontends.twins import averaged
from tests.world import Ranks

World = Callable[[int], Ranks]
FEEDBACK = ErrorFeedback(TopK(0.2))
TWO_WAY, GATHERED = CompressedTwoWay(FEEDBACK), CompressedAllGather(FEEDBACK)
LOW_RANK = PowerSGD(1, min_compression=1.0)
COARSE = CoarseGrained(ratio=0.2, chunk=16, max_age=12)
LATE, EXACT = (CoarseGrained(ratio=0.3, chunk=4, choice=choice) for choice in ("late", "exact"))


def plan_for(model: nn.Module, scheme: Scheme[Any], *cuts: list[tuple[str, int, int]]) -> Plan:
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    parts = list(cuts) or [[(name, 0, spec.numel) for name, spec in specs.items()]]
    return Plan.make(specs, dist.get_world_size(), [(part, scheme) for part in parts])


def train(model: nn.Module, steps: int, seed: int) -> list[Tensor]:
    """Trains the model and returns its weights."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(model: nn.Module, scheme: Scheme[Any], steps: int) -> tuple[gradsync.Attachment, dict[str, Any]]:
    """Attaches and trains the model; returns it with its state."""
    handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
    train(model, steps, seed=0)
    return handle, handle.state_dict()


def resumes_bit_by_bit() -> None:
    for scheme in (TWO_WAY, GATHERED, Sparsified(FEEDBACK), LOW_RANK, COARSE):
        torch.manual_seed(0)
        model = Perceptron()
        handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
        train(model, 3, seed=0)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "gradsync": handle.state_dict()}, buffer)
        expected = train(model, 3, seed=7)
        handle.detach()
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        other = Perceptron()
        other.load_state_dict(saved["model"])
        handle = gradsync.attach(other, plan=plan_for(other, scheme), timeout=10)
        handle.load_state_dict(saved["gradsync"])
        for got, value in zip(train(other, 3, seed=7), expected, strict=True):
            assert torch.equal(got, value), scheme.title
        handle.detach()


def state_of_other_steps_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle, saved = trained(model, GATHERED, 2)
    with pytest.raises(ValueError, match=r"the ranks differ: step 7 on rank 0, step 8 on rank 1"):
        handle.load_state_dict({**saved, "step": 7 + dist.get_rank()})
    key = "weight[0:18]/sent.residual"
    for wrong in (torch.zeros(18).to_sparse(), torch.zeros(18, dtype=torch.int64), "a residual"):
        with pytest.raises(ValueError, match="must be a dense floating-point tensor, got"):
            handle.load_state_dict({**saved, "state": {**saved["state"], key: wrong}})
    ghost = {"weight[0:18]//sent.q": torch.ones(2, 6)}
    with pytest.raises(ValueError, match=r"no place for the state 'weight\[0:18\]//sent.q'"):
        handle.load_state_dict({**saved, "state": saved["state"] | ghost})
    assert handle.state_dict()["step"] == 2
    assert torch.equal(handle.state_dict()["state"][key], saved["state"][key])
    handle.detach()


def test_state_that_ranks_saved_at_different_steps_or_that_is_none_is_refused(world: World) -> None:
    world(2).run(state_of_other_steps_is_refused)


def residuals_follow_parameters_into_other_cuts() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle, saved = trained(model, GATHERED, 3)
    before = saved["state"]["weight[0:18]/sent.residual"].clone()
    assert saved["step"] == 3
    handle.detach()
    cut = plan_for(model, GATHERED, [("weight", 11, 18), ("bias", 0, 3)], [("weight", 0, 11)])
    handle = gradsync.attach(model, plan=cut, timeout=10)
    handle.load_state_dict(saved)
    state = handle.state_dict()["state"]
    assert torch.equal(torch.cat([state["weight[0:11]/sent.residual"], state["weight[11:18]/sent.residual"]]), before)
    handle.detach()


def factors_follow_their_parameters_into_other_buckets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 8))
    names = [(name, 0, p.numel()) for name, p in model.named_parameters()]
    handle, saved = trained(model, LOW_RANK, 3)
    handle.detach()
    apart = plan_for(model, LOW_RANK, names[2:], names[:2])
    handle = gradsync.attach(model, plan=apart, timeout=10)
    handle.load_state_dict(saved)
    state = handle.state_dict()["state"]
    assert state.keys() == saved["state"].keys()
    assert {key for key in state if key.endswith(".q")} >= {"0.weight[0:72]//sent.q", "1.weight[0:96]//sent.q"}
    for key, value in state.items():
        assert torch.equal(value, saved["state"][key]), key
    handle.detach()
    expected = averaged(torch.autograd.grad(loss_of(model), model[1].weight)[0])
    cut = [*names[:2], ("1.weight", 0, 40)], [("1.weight", 40, 96), names[3]]  # no matrix any more: dense
    handle = gradsync.attach(model, plan=plan_for(model, LOW_RANK, *cut), timeout=10)
    handle.load_state_dict(saved)
    model.zero_grad()
    loss_of(model).backward()
    left = averaged(saved["state"]["1.weight[0:96]/sent.residual"]).view(8, 12)
    torch.testing.assert_close(model[1].weight.grad, expected + left)
    assert not handle.state_dict()["state"]["1.weight[40:96]/sent.residual"].any()
    handle.detach()


def convolution(memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 2).to(memory_format=memory_format)


def train_convolution(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(2, 3, 4, 4, generator=generator)).square().mean().backward()
        assert model.weight.grad.stride() == model.weight.stride()


def state_is_in_the_order_of_elements_not_of_memory() -> None:
    for scheme in (TWO_WAY, GATHERED, LOW_RANK):
        saved = {}
        for memory_format in (torch.contiguous_format, torch.channels_last):
            model = convolution(memory_format)
            handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
            train_convolution(model)
            saved[memory_format] = handle.state_dict()
            handle.detach()
        expected, got = (each["state"] for each in saved.values())
        assert got.keys() == expected.keys()
        for key, values in expected.items():
            torch.testing.assert_close(got[key], values, msg=f"{scheme.title}: {key}")
        model = convolution(torch.channels_last)
        cut = plan_for(model, scheme, [("weight", 0, 17)], [("weight", 17, 48), ("bias", 0, 4)])
        handle = gradsync.attach(model, plan=cut, timeout=10)
        handle.load_state_dict(saved[torch.channels_last])
        train_convolution(model)
        handle.detach()


def every_step_sends_the_bytes_that_are_predicted_for_it() -> None:
    milder_first = ErrorFeedback(Warmup((TopK(0.5), TopK(0.1)), (0, 3)))
    for scheme in (
        CompressedTwoWay(milder_first),
        CompressedTwoWay(FEEDBACK, milder_first),
        CompressedAllGather(milder_first),
        PowerSGD(1, min_compression=1.0, start_step=3),
        CoarseGrained(ratio=0.2, chunk=16, warmup=(1.0,), steps_per_ratio=3),
        HalfPrecision(CompressedAllGather(milder_first)),
    ):
        model = Perceptron()
        handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
        sent = [0.0]
        for _ in range(5):
            train(model, 1, seed=0)
            (bucket,) = handle.statistics()
            assert bucket.sent_bytes == bucket.predicted_bytes, (scheme.title, len(sent))
            sent.append(bucket.sent_bytes)
        steps = [after - before for before, after in zip(sent, sent[1:], strict=False)]
        assert steps[0] == steps[1] == steps[2] > steps[3] == steps[4]
        saved = handle.state_dict()
        handle.detach()
        handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
        handle.load_state_dict(saved)
        train(model, 1, seed=0)
        assert handle.statistics()[0].sent_bytes == handle.statistics()[0].predicted_bytes == steps[-1]
        handle.detach()


def gradients_of(model: nn.Module, seed: int, factor: float = 1.0) -> dict[str, Tensor]:
    """Returns the synchronised gradients of one backward, without an optimiser step."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    model.zero_grad()
    (factor * model(torch.randn(5, 6, generator=generator)).square().mean()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def what_was_left_goes_with_gradients_that_are_not_compressed() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    for scheme in (GATHERED, TWO_WAY, LOW_RANK, COARSE):
        handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
        for _ in range(2):
            gradients_of(model, seed=0)
        saved = handle.state_dict()
        handle.detach()
        assert any(values.any() for values in saved["state"].values())
        left = left_to_send(model, saved["state"])
        handle = gradsync.attach(model, plan=plan_for(model, AllReduce()), timeout=10)
        plain = gradients_of(model, seed=1)
        handle.load_state_dict({**saved, "state": {k: v for k, v in saved["state"].items() if "//" not in k}})
        spoilt = gradients_of(model, seed=1, factor=torch.nan if dist.get_rank() == 0 else 1.0)
        assert all(gradient.isnan().all() for gradient in spoilt.values())
        state = handle.state_dict()["state"]
        for name, values in left.items():
            assert torch.equal(state[f"{name}[0:{len(values)}]/owed.residual"], values), "it was not sent yet"
        with_rest, after = gradients_of(model, seed=1), gradients_of(model, seed=1)
        for name, gradient in plain.items():
            total = left[name].view_as(gradient).clone()
            dist.all_reduce(total)
            assert torch.allclose(with_rest[name], gradient + total / 2, atol=1e-6), scheme.title
            assert torch.equal(after[name], gradient), "sent once"
        assert not handle.state_dict()["state"]
        handle.detach()


def what_is_left_to_do_may_have_a_turn_of_its_own() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    names = list(dict(model.named_parameters()))
    cuts = [[(name, 0, p.numel())] for name, p in model.named_parameters()]
    plan = plan_for(model, TWO_WAY, *cuts)
    early = [(bucket.id, stage) for bucket in plan.buckets for stage in ("push", "pull", FINISH)]
    results = []
    for order in (plan.order, tuple(early)):
        handle = gradsync.attach(model, plan=plan.model_copy(update={"order": order}), timeout=10)
        results.append([gradients_of(model, seed=step) for step in range(3)])
        finishes = [task.name for task in handle.timeline() if task.name.endswith(f":{FINISH}")]
        assert finishes == [f"{number}:{FINISH}" for number in range(len(names))]
        handle.detach()
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in names)


def nothing_is_lost_while_plans_take_turns() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    alone = copy.deepcopy(model)
    schemes = (GATHERED, AllReduce(), TWO_WAY, LOW_RANK)
    plans = [plan_for(model, scheme) for scheme in schemes]
    handle = gradsync.attach(model, plan=lambda profiles, size: plans, timeout=10)
    came_in = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    came_out = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    ran: set[str] = set()
    for step in range(3 + (2 * len(plans) + 2 * RUN_OFF_ROUNDS) * TURN_STEPS):
        ran.add(handle.plan.digest)
        for name, gradient in gradients_of(model, seed=step).items():
            came_out[name] += dist.get_world_size() * gradient
        for name, gradient in gradients_of(alone, seed=step).items():
            came_in[name] += gradient
    assert ran == {plan.digest for plan in plans} and handle.settled
    left = left_to_send(model, handle.state_dict()["state"])
    for name, total in came_in.items():
        sent = total - left[name].view_as(total)
        dist.all_reduce(sent)
        assert torch.allclose(sent, came_out[name], atol=1e-4), name
    handle.detach()


def what_has_no_place_is_not_lost_silently() -> None:
    model = Perceptron()
    handle = gradsync.attach(model, plan=plan_for(model, GATHERED), timeout=10)
    train(model, 2, seed=0)
    saved = handle.state_dict()
    handle.detach()
    rank = dist.get_rank()
    handle = gradsync.attach(model, plan=plan_for(model, GATHERED), timeout=10)
    train(model, 1, seed=1)
    before = handle.state_dict()
    momentum = {key.replace("residual", "momentum"): values for key, values in saved["state"].items()}
    ghost = {"ghost[0:1]/sent.residual": torch.ones(1)}
    for bad, error in (
        ({**saved, "state": saved["state"] | momentum}, "no place for the state .*momentum'"),
        ({**saved, "state": saved["state"] | ghost}, "'ghost', which is no parameter to synchronise here"),
        ({**saved, "step": "2"}, "step must be a whole number"),
        ({**saved, "state": 3}, "the state's 'state' must be a dict of tensors, got int"),
    ):
        for broken in (0, 1):  # on one rank only
            kind = ValueError if rank == broken else RuntimeError
            text = error if rank == broken else f"rank {broken} could not: .*{error}"
            with pytest.raises(kind, match=text):
                handle.load_state_dict(bad if rank == broken else saved)
        after = handle.state_dict()
        assert after["step"] == before["step"]
        for key, values in before["state"].items():
            assert torch.equal(after["state"][key], values), "nothing of it was applied"
    handle.load_state_dict({**saved, "state": saved["state"] | momentum | ghost}, strict=False)
    for key, values in saved["state"].items():
        assert torch.equal(handle.state_dict()["state"][key], values), "what has a place is taken"
    train(model, 1, seed=1)
    handle.detach()


def steps_that_are_not_finite_leave_no_trace(names: list[str]) -> None:
    torch.manual_seed(0)
    for name in names:
        compressor = MEMBERS[name].compressor
        votes = (MajorityVote(compressor), MajorityVote(compressor, "two_way")) if isinstance(compressor, Sign) else ()
        for scheme in (*ways(compressor), *votes):
            model = nn.Linear(6, 3)
            handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
            loss_of(model).backward()
            before = copy.deepcopy(handle.state_dict()["state"])
            for value in (float("inf"), float("nan")):
                model.zero_grad()
                (loss_of(model) * (value if dist.get_rank() == 1 else 1.0)).backward()
                assert all(p.grad.isnan().all() for p in model.parameters()), (name, scheme.title)
                after = handle.state_dict()["state"]
                assert after.keys() == before.keys()
                assert all(torch.equal(after[key], kept) for key, kept in before.items()), (name, scheme.title)
            model.zero_grad()
            loss_of(model).backward()
            assert all(p.grad.isfinite().all() for p in model.parameters()), (name, scheme.title)
            handle.detach()


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))).square().mean()


def what_nobody_used_stays_none_and_inf_spoils_the_step() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"kept": nn.Linear(6, 3, bias=False), "unused": nn.Linear(2, 2)})
    handle = gradsync.attach(model, plan=plan_for(model, TWO_WAY), timeout=10)
    x = torch.randn(4, 6)
    model["kept"](x).sum().backward()
    assert model["unused"].weight.grad is None
    before = copy.deepcopy(handle.state_dict()["state"])
    model.zero_grad()
    (model["kept"](x).sum() * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    assert model["kept"].weight.grad.isnan().all()
    for key, value in handle.state_dict()["state"].items():
        assert torch.equal(value, before[key]), key
    handle.detach()


def a_jump_of_the_learning_rate_loses_nothing() -> None:
    """Changes the learning rate: residuals are in units of the gradient, so a later rate applies to them."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle = gradsync.attach(model, plan=plan_for(model, GATHERED), timeout=10)
    brought, given = torch.zeros(18), torch.zeros(18)
    for rate in (0.0, 0.0, 1.0, 0.1, 0.0, 0.01):
        model.zero_grad()
        x = torch.randn(4, 6)
        brought += averaged(x.sum(0).repeat(3))
        model(x).sum().backward()
        given += model.weight.grad.flatten()
        with torch.no_grad():
            model.weight -= rate * model.weight.grad
    left = averaged(handle.state_dict()["state"]["weight[0:18]/sent.residual"])
    torch.testing.assert_close(given + left, brought, rtol=1e-5, atol=1e-5)
    handle.detach()


def left_in_all(handle: gradsync.Attachment) -> Tensor:
    """Returns the sum of all ranks' residuals of the weight at both compress points, (18,)."""
    total = torch.zeros(18)
    for key, values in handle.state_dict()["state"].items():
        form = re.fullmatch(r"weight\[(\d+):(\d+)\]/(sent|sums).residual", key)
        if form is not None:
            total[int(form[1]) : int(form[2])] += values
    return averaged(total) * dist.get_world_size()


def owners_hand_over_what_they_no_longer_own() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle = gradsync.attach(model, plan=plan_for(model, TWO_WAY), timeout=10)
    train(model, 3, seed=0)
    saved, before = handle.state_dict(), left_in_all(handle)
    assert before.any()
    handle.detach()
    cut = plan_for(model, TWO_WAY, [("bias", 0, 3), ("weight", 0, 4)], [("weight", 4, 18)])
    handle = gradsync.attach(model, plan=cut, timeout=10)
    handle.load_state_dict(saved)
    torch.testing.assert_close(left_in_all(handle), before)
    train(model, 2, seed=1)
    handle.detach()


def what_nobody_used_is_not_sent(scheme: Scheme[Any]) -> None:
    """Checks an unused parameter: its gradient is None, so a residual that was sent would be lost."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"often": nn.Linear(6, 3, bias=False), "seldom": nn.Linear(6, 3, bias=False)})
    handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
    brought, given = torch.zeros(18), torch.zeros(18)
    for step in range(6):
        model.zero_grad()
        x = torch.randn(4, 6)
        loss = model["often"](x).sum()
        if step % 2 == 0:
            loss = loss + model["seldom"](x).sum()
            brought += averaged(x.sum(0).repeat(3))
        loss.backward()
        gradient = model["seldom"].weight.grad
        assert (gradient is None) == (step % 2 == 1)
        given += 0 if gradient is None else gradient.flatten()
    left = sum(
        torch.cat([torch.zeros(s), v, torch.zeros(18 - e)])
        for key, v in handle.state_dict()["state"].items()
        if key.startswith("seldom") and "residual" in key
        for s, e in [tuple(map(int, re.findall(r"\[(\d+):(\d+)\]", key)[0]))]
    )
    torch.testing.assert_close(given + averaged(left), brought, rtol=1e-5, atol=1e-5)
    handle.detach()


def test_owners_hand_over_what_they_no_longer_own(world: World) -> None:
    world(2).run(owners_hand_over_what_they_no_longer_own)


@pytest.mark.parametrize("scheme", [TWO_WAY, LATE, EXACT], ids=["two ways", "late chunks", "exact chunks"])
def test_what_nobody_used_is_not_sent(world: World, scheme: Scheme[Any]) -> None:
    world(2).run(what_nobody_used_is_not_sent, scheme)


def test_a_resumed_run_is_the_same_bit_by_bit(world: World) -> None:
    world(2).run(resumes_bit_by_bit)


def test_residuals_follow_parameters_into_other_cuts(world: World) -> None:
    world(2).run(residuals_follow_parameters_into_other_cuts)


def test_factors_follow_their_parameters_into_other_buckets(world: World) -> None:
    world(2).run(factors_follow_their_parameters_into_other_buckets)


def test_state_is_in_the_order_of_elements_not_of_memory(world: World) -> None:
    world(2).run(state_is_in_the_order_of_elements_not_of_memory)


def test_every_step_sends_the_bytes_that_are_predicted_for_it(world: World) -> None:
    world(2).run(every_step_sends_the_bytes_that_are_predicted_for_it)


def test_what_was_left_goes_with_gradients_that_are_not_compressed(world: World) -> None:
    world(2).run(what_was_left_goes_with_gradients_that_are_not_compressed)


def test_what_is_left_to_do_may_have_a_turn_of_its_own(world: World) -> None:
    world(2).run(what_is_left_to_do_may_have_a_turn_of_its_own)


def test_nothing_is_lost_while_plans_take_turns(world: World) -> None:
    world(2).run(nothing_is_lost_while_plans_take_turns)


def test_what_has_no_place_is_not_lost_silently(world: World) -> None:
    world(2).run(what_has_no_place_is_not_lost_silently)


@pytest.mark.parametrize("quarter", range(4))
def test_steps_that_are_not_finite_leave_no_trace(world: World, quarter: int) -> None:
    world(2).run(steps_that_are_not_finite_leave_no_trace, list(MEMBERS)[quarter::4])


def test_flags_ride_with_payloads(world: World) -> None:
    world(2).run(what_nobody_used_stays_none_and_inf_spoils_the_step)


def test_a_jump_of_the_learning_rate_loses_nothing(world: World) -> None:
    world(2).run(a_jump_of_the_learning_rate_loses_nothing)


def a_carried_residual_survives_a_checkpoint() -> None:
    """Saves a carried residual before it is sent, loads it under a compressing plan, and finds it unsent there."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle, saved = trained(model, GATHERED, 2)
    left = saved["state"]["weight[0:18]/sent.residual"].clone()
    handle.detach()
    for scheme in (AllReduce(), GATHERED, AllReduce(), TWO_WAY):
        handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
        handle.load_state_dict(saved)
        saved = handle.state_dict()
        kept = sum(values for key, values in saved["state"].items() if key.startswith("weight[0:18]/"))
        ranges = [values for key, values in saved["state"].items() if re.match(r"weight\[\d+:\d+\]/sent", key)]
        found = kept if isinstance(kept, Tensor) else torch.cat(ranges)
        assert left.any() and torch.equal(found, left), scheme.title
        handle.detach()


def test_a_carried_residual_survives_a_checkpoint(world: World) -> None:
    world(2).run(a_carried_residual_survives_a_checkpoint)


NO_MEANS = {
    "momentum": CompressingPlanner(MomentumCorrection(TopK(0.5))),
    "momentum of a scheme": CompressingPlanner(CoarseGrained(ratio=0.5, chunk=4, momentum=0.9)),
    "signs": CompressingPlanner(MajorityVote(Sign())),
    "signs of momentum": CompressingPlanner(MajorityVote(Signum())),
}


def two_backwards(model: nn.Module, plan: CompressingPlanner, clears: bool | None, **settings: Any) -> list[str]:
    """Trains by two synchronised backwards in a step; `clears`: `set_to_none` of a zero_grad between; None: no call."""
    handle, said = gradsync.attach(model, plan=plan, timeout=10, **settings), [""] * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 8)).sum().backward()
        if clears is not None:
            optimizer.zero_grad(set_to_none=clears)
        try:
            (-3 * model(torch.ones(3, 8)).sum()).backward()
        except RuntimeError as error:
            said[step] = str(error)
            break
        optimizer.step()
    handle.detach()
    return said


def two_backwards_of_each_kind() -> None:
    for name, plan in NO_MEANS.items():
        for model in (nn.Linear(8, 4, bias=False), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))):
            said = two_backwards(model, plan, None)
            assert "all backwards of a step but the last inside no_sync()" in said[0], (name, said)
            for clears in (True, False):
                assert not any(two_backwards(model, plan, clears)), name
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    assert not any(two_backwards(model, CompressingPlanner(ErrorFeedback(TopK(0.5))), None))


def test_a_result_that_is_no_mean_is_not_averaged_again(world: World) -> None:
    world(2).run(two_backwards_of_each_kind)


def backwards_of_parts() -> None:
    """Makes two backwards in a step, each of other parameters: no result is averaged again."""
    parts = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    handle = gradsync.attach(parts, plan=NO_MEANS["momentum"], timeout=10)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for part in parts:
            part(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    handle.detach()


def test_backwards_of_other_parameters_may_follow_each_other(world: World) -> None:
    world(2).run(backwards_of_parts)
