"""State is loaded by the rank that saved it, whole and finite, on all ranks at once; anything else raises on all."""

from __future__ import annotations

import copy
import io
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.comm.store import StoreClient
from gradsync.compressors import Cast, ErrorFeedback, TopK
from gradsync.engine import engine_state
from gradsync.engine.bucket_run import BucketRun
from gradsync.planner import CompressingPlanner
from gradsync.plans.plan import What
from gradsync.schemes import AllReduce, CompressedAllGather, CompressedTwoWay, PowerSGD, Scheme
from gradsync.state import StateSlice
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]
FEEDBACK = ErrorFeedback(TopK(0.2))
GATHERED, TWO_WAY = CompressedAllGather(FEEDBACK), CompressedTwoWay(FEEDBACK)
KEY = "layers.0.weight[0:48]/sent.residual"


def attached(model: nn.Module, scheme: Scheme[Any] = GATHERED, timeout: float = 10) -> gradsync.Attachment:
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), scheme)])
    return gradsync.attach(model, plan=plan, timeout=timeout)


def train(model: nn.Module, steps: int = 1) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()


def trained(scheme: Scheme[Any] = GATHERED) -> tuple[nn.Module, gradsync.Attachment, dict[str, Any]]:
    torch.manual_seed(0)
    model = Perceptron()
    handle = attached(model, scheme)
    train(model, 3)
    return model, handle, copy.deepcopy(handle.state_dict())


def everyones(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the states of all ranks, as loaded from files."""
    stream = io.BytesIO()
    torch.save(state, stream)
    contents: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(contents, stream.getvalue())
    return [torch.load(io.BytesIO(content), weights_only=True) for content in contents]


def require_same(handle: gradsync.Attachment, before: dict[str, Any]) -> None:
    after = handle.state_dict()
    assert {k: v for k, v in after.items() if k != "state"} == {k: v for k, v in before.items() if k != "state"}
    assert after["state"].keys() == before["state"].keys()
    assert all(torch.equal(after["state"][key], values) for key, values in before["state"].items())


# State of another rank or model.


def another_ranks_state_is_refused() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, handle, saved = trained()
    states = everyones(saved)
    assert (saved["rank"], saved["world"], saved["per_rank"]) == (rank, size, True)
    said = []
    swapped = [1, 0, 2]
    for given in (states[swapped[rank]], states[0], states[2], states[min(rank, 1)]):
        with pytest.raises(ValueError, match="loading of state") as caught:
            handle.load_state_dict(given)
        said.append(str(caught.value))
        require_same(handle, saved)
    handle.load_state_dict(states[rank])
    train(model)
    handle.detach()
    return said


def test_another_ranks_state_or_one_ranks_on_several_raises_on_all(world: World) -> None:
    said = world(3).run(another_ranks_state_is_refused)
    assert said[0] == said[1] == said[2]
    swapped, first, last, doubled = said[0]
    assert "rank 0 was given the state of rank 1" in swapped
    assert "ranks 0, 1, 2 were given the same state, that of rank 0" in first
    assert "ranks 0, 1, 2 were given the same state, that of rank 2" in last
    assert "ranks 1, 2 were given the same state, that of rank 1" in doubled


class Other(nn.Module):
    """Perceptron's elements in other shapes, or under other names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        inner = Perceptron(torch.float64 if kind == "type" else torch.float32)
        if kind == "name":
            self.tiers, self.scale, self.nothing = inner.layers, inner.scale, inner.nothing
        else:
            self.layers, self.scale, self.nothing = inner.layers, inner.scale, inner.nothing
        if kind == "shape":
            self.layers[0] = nn.Linear(8, 6, bias=False)  # as many elements of the weight


def another_models_state_is_refused(kind: str) -> list[str]:
    _, handle, saved = trained()
    handle.detach()
    other = Other(kind)
    handle = attached(other)
    before = handle.state_dict()
    good = {**before, "step": 3} if dist.get_rank() == 0 else saved  # on one rank only
    said = []
    for given in (saved, good):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            handle.load_state_dict(given)
        said.append(str(caught.value))
        require_same(handle, before)
    handle.load_state_dict(saved, strict=False)
    assert handle.state_dict()["step"] == 3
    handle.detach()
    return said


@pytest.mark.parametrize("kind", ["name", "shape", "type"])
def test_the_state_of_another_model_raises_on_all(world: World, kind: str) -> None:
    for said in world(2).run(another_models_state_is_refused, kind):
        for text in said:
            assert "no parameter to synchronise here" in text or "a model with other parameters" in text, text


def parameters_may_come_in_another_order() -> None:
    _, handle, saved = trained()
    handle.detach()
    torch.manual_seed(0)
    model = Perceptron()
    layers = model._modules.pop("layers")
    model.scale, model.nothing = nn.Parameter(model.scale.data), nn.Parameter(model.nothing.data)
    model.layers = layers
    model._parameters = dict(reversed(model._parameters.items()))
    handle = attached(model)
    handle.load_state_dict(saved)
    handle.detach()


def test_parameters_may_come_in_another_order(world: World) -> None:
    world(2).run(parameters_may_come_in_another_order)


def save_exactly() -> dict[str, Any]:
    _, handle, saved = trained(AllReduce())
    assert not saved["per_rank"]
    handle.load_state_dict(everyones(saved)[0])
    handle.detach()
    return saved


def load_exactly(saved: dict[str, Any]) -> None:
    handle = attached(Perceptron())
    handle.load_state_dict(saved)
    assert handle.state_dict()["step"] == 3
    handle.detach()


def test_where_ranks_keep_nothing_any_ranks_state_will_do_on_any_number_of_ranks(world: World) -> None:
    saved = world(2).run(save_exactly)[1]
    world(3).run(load_exactly, saved)


def what_another_rank_carries_over_counts() -> None:
    """Gives a carried residual to rank 1 only: its state is not valid for other ranks."""
    torch.manual_seed(0)
    model = Perceptron()
    handle = attached(model, AllReduce())
    carried = {KEY: torch.ones(48)} if dist.get_rank() == 1 else {}
    handle.load_state_dict({**handle.state_dict(), "state": carried})
    saved = handle.state_dict()
    assert saved["per_rank"] and len(saved["state"]) == len(carried) * 8
    with pytest.raises(ValueError, match="ranks 0, 1 were given the same state, that of rank 0"):
        handle.load_state_dict(everyones(saved)[0])
    require_same(handle, saved)
    handle.detach()


def test_the_state_of_a_rank_that_carries_nothing_is_not_that_of_one_that_does(world: World) -> None:
    world(2).run(what_another_rank_carries_over_counts)


def a_parameter_of_another_size_begins_anew(size: int) -> None:
    """Changes the size of a parameter, as of a head for another number of classes: its state starts anew."""

    def make(classes: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, classes))

    model = make(10)
    handle = attached(model)
    train(model, 3)
    saved = handle.state_dict()
    handle.detach()
    model = make(size)
    handle = attached(model)
    with pytest.raises(ValueError):
        handle.load_state_dict(saved)
    handle.load_state_dict(saved, strict=False)
    for key, values in handle.state_dict()["state"].items():
        expected = saved["state"][key] if key.startswith("0.") else torch.zeros_like(values)
        assert torch.equal(values, expected), key
    with pytest.raises(ValueError, match="the state's plan is none"):
        handle.load_state_dict({**saved, "plan": "[]"}, strict=False)
    handle.detach()


@pytest.mark.parametrize("size", [5, 20])
def test_without_strict_the_state_of_parameters_of_other_sizes_is_dropped(world: World, size: int) -> None:
    world(2).run(a_parameter_of_another_size_begins_anew, size)


def without_strict_another_ranks_state_is_dropped() -> None:
    _, handle, saved = trained()
    handle.load_state_dict({**everyones(saved)[0], "step": 7}, strict=False)
    after = handle.state_dict()
    assert after["step"] == 7
    for key, values in after["state"].items():
        expected = saved["state"][key] if dist.get_rank() == 0 else torch.zeros_like(values)
        assert torch.equal(values, expected)
    handle.detach()


def test_without_strict_another_ranks_state_is_dropped(world: World) -> None:
    world(2).run(without_strict_another_ranks_state_is_dropped)


def strict_on_some_ranks_only() -> None:
    _, handle, saved = trained()
    for given in (saved, {**saved, "rank": 1 - dist.get_rank()}):
        with pytest.raises(ValueError, match="the ranks differ: step 3 on rank 0, step 3, not strict on rank 1"):
            handle.load_state_dict(given, strict=dist.get_rank() == 0)
        require_same(handle, saved)
    handle.detach()


def test_strict_on_some_ranks_only_raises_on_all(world: World) -> None:
    world(2).run(strict_on_some_ranks_only)


# State with wrong contents.

N = 48
BAD_VALUES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "not a number": (lambda v: v.index_fill(0, torch.tensor(5), math.nan), "holds nan at element 5"),
    "infinity": (lambda v: v.index_fill(0, torch.tensor(0), -math.inf), "holds -inf at element 0"),
    "half": (lambda v: v.half(), "is torch.float16, torch.float32 is kept there"),
    "bfloat16": (lambda v: v.bfloat16(), "is torch.bfloat16, torch.float32 is kept there"),
    "double": (lambda v: v.double(), "is torch.float64, torch.float32 is kept there"),
    "float8": (lambda v: v.to(torch.float8_e4m3fn), "must be a dense floating-point tensor, got torch.float8_e4m3fn"),
    "meta": (lambda v: v.to("meta"), "must be a dense floating-point tensor, got torch.float32 torch.strided on meta"),
    "whole numbers": (lambda v: v.long(), "must be a dense floating-point tensor, got torch.int64"),
    "list": (lambda v: v.tolist(), "must be a dense floating-point tensor, got list"),
    "short": (lambda v: v[:-1], r"has values of shape \(47,\)"),
}
BAD_KEYS: dict[str, tuple[dict[Any, Any], str]] = {
    "part of it twice": ({"layers.0.weight[40:44]/sent.residual": torch.ones(4)}, "overlap: elements are there twice"),
    "all of it twice": ({"layers.0.weight[00:48]/sent.residual": torch.ones(N)}, "overlap: elements are there twice"),
    "backwards": ({"layers.0.weight[9:3]/sent.momentum": torch.ones(6)}, "expected a state's key to read"),
    "far out": ({f"layers.0.weight[0:{'9' * 5000}]/sent.residual": torch.ones(N)}, "expected a state's key to read"),
    "other digits": ({"layers.0.weight[\u0660:48]/sent.residual": torch.ones(N)}, "expected a state's key to read"),
    "number": ({5: torch.ones(N)}, "expected a state's key to read"),
}
BAD_ENTRIES: dict[str, tuple[Any, str]] = {
    "step": (True, "step must be a whole number, got True"),
    "step ": (1 << 53, r"step must be in \[0, 9007199254740992\)"),
    "step  ": (10**30, r"step must be in \[0, 9007199254740992\)"),
    "step   ": (3.0, "step must be a whole number"),
    "plan ": ("garbage", "the state's plan is none: the state's plan is no JSON"),
    "plan  ": ('{"buckets": [{"segments": [["w", 0, 4.5]]}]}', "a bucket's segments.*whole number, got 4.5"),
    "plan": (None, "plan must be a text, got None"),
    "rank": (5, "rank must be below its world, the number of ranks, got 5 of 2"),
    "world": (True, "world must be a whole number, got True"),
    "parameters": (7, "parameters must be a text, got 7"),
    "per_rank": (1, "per_rank must be True or False, got 1"),
    "state": ([], "'state' must be a dict of tensors, got list"),
    "version": (3.0, "expected a gradsync state of version 3, got version 3.0"),
    "loss_scale": (math.nan, r"loss_scale must be in \(0, inf\) or None, got nan"),
    "references": (3, "references must be a dict"),
}
BAD_WHOLES = (None, [], 5, "state", torch.zeros(3))


def bad_states_raise_on_all(broken: int) -> None:
    model, handle, saved = trained()
    cases: list[tuple[Any, str, bool]] = []
    for change, text in BAD_VALUES.values():
        cases.append(({**saved, "state": {**saved["state"], KEY: change(saved["state"][KEY])}}, text, True))
    for keys, text in BAD_KEYS.values():
        cases.append(({**saved, "state": {**saved["state"], **keys}}, text, "overlap" in text))
    cases += [({**saved, name.strip(): value}, text, False) for name, (value, text) in BAD_ENTRIES.items()]
    cases += [(whole, "expected the dict that state_dict", False) for whole in BAD_WHOLES]
    for bad, text, names in cases:
        mine = dist.get_rank() == broken
        with pytest.raises((ValueError, TypeError) if mine else RuntimeError, match=text) as caught:
            handle.load_state_dict(bad if mine else saved)
        assert mine or f"rank {broken} could not" in str(caught.value)
        assert not names or "layers.0.weight" in str(caught.value)
        require_same(handle, saved)
    handle.load_state_dict(saved)
    train(model)
    handle.detach()


@pytest.mark.parametrize("broken", [0, 1])
def test_what_is_no_state_raises_on_all_before_anything_changes(world: World, broken: int) -> None:
    world(2).run(bad_states_raise_on_all, broken)


def what_first_steps_showed() -> None:
    """Loads damaged records of the first steps, none, as in older files, and one that does not fit."""
    model, planner = Perceptron(), CompressingPlanner(FEEDBACK)
    handle = gradsync.attach(model, plan=planner, timeout=10)
    first = handle.plan
    train(model, 2)
    saved, planned, rank = copy.deepcopy(handle.state_dict()), handle.plan, dist.get_rank()
    assert planned != first
    without = {name: entry for name, entry in saved.items() if name != "observed"}
    for other, text in (
        ({**saved, "observed": 5}, r"the state's 'observed' is not what state_dict\(\) gave: got 5"),
        ({**saved, "observed": "{"}, "the record of the first steps is no JSON"),
        (without, r"the ranks differ: step 2, plan \w+ by measurement \w+ on rank 0, step 2 on rank 1"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=text):
            handle.load_state_dict(other if rank == 1 else saved)
        require_same(handle, saved)
    handle.detach()
    sparse = saved["observed"].replace('"sparse": false', '"sparse": true').replace('"digest"', '"digest of before"')
    unfit = {**saved, "observed": re.sub(r',\s*"digest of before": "\w+"', "", sparse)}
    for state, plan in ((saved, planned), (without, first), (unfit, None)):
        handle = gradsync.attach(model, plan=planner, timeout=10)
        if plan is None:  # known to be dense here
            train(model, 2)
        expected, steps = plan or handle.plan, handle.totals().steps
        handle.load_state_dict(state)
        assert handle.plan == expected and handle.settled == (state is saved or steps > 0)
        assert handle.totals().steps == steps
        kept = handle.state_dict()["state"]
        assert all(torch.equal(kept[key], values) for key, values in saved["state"].items())
        train(model, 2)
        assert handle.plan == planned, "after the first step in any case"
        handle.detach()


def test_what_first_steps_showed_is_gone_on_with_if_it_is_there_and_fits(world: World) -> None:
    world(2).run(what_first_steps_showed)


def element_types_of_factors() -> None:
    _, handle, saved = trained(PowerSGD(1, min_compression=1.0))
    key = "layers.0.weight[0:48]//sent.q"
    for change, text in (
        (saved["state"][key].double(), "is torch.float64, torch.float32 is kept there"),
        (saved["state"][key] * math.inf, "at element 0 of its values"),
    ):
        with pytest.raises(ValueError, match=text):
            handle.load_state_dict({**saved, "state": {**saved["state"], key: change}})
        require_same(handle, saved)
    handle.load_state_dict({**saved, "state": {**saved["state"], KEY: saved["state"][KEY].half()}}, strict=False)
    assert handle.state_dict()["state"][KEY].dtype is torch.float32
    handle.detach()
    handle = attached(Perceptron(), AllReduce())
    for change in (torch.Tensor.half, torch.Tensor.double):  # of what goes with the next gradients
        handle.load_state_dict({**saved, "state": {KEY: change(saved["state"][KEY])}}, strict=False)
        carried = handle.state_dict()
        assert {values.dtype for values in carried["state"].values()} == {torch.float32}
        handle.load_state_dict(carried)
    handle.detach()


def test_other_element_types_are_refused_unless_they_are_asked_for(world: World) -> None:
    world(2).run(element_types_of_factors)


def bad_references_raise_on_all() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    rounded = CompressedAllGather(Cast("bfloat16"))
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), rounded)], what=What.PARAMETER)
    handle = gradsync.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, timeout=10)
    saved = handle.state_dict()
    name, reference = "layers.0.weight", saved["references"]["layers.0.weight"]
    for wrong, text in (
        (reference[:1], "reference of 'layers.0.weight' is 1x6 float32, here it is 8x6 float32"),
        (reference.half(), "is 8x6 float16, here it is 8x6 float32"),
        (reference / 0, "values that are not finite"),
        ("text", "must be a dense tensor of 8x6 float32, got"),
    ):
        bad = {**saved, "references": {**saved["references"], name: wrong}}
        with pytest.raises((ValueError, RuntimeError), match=text):
            handle.load_state_dict(bad if dist.get_rank() == 1 else saved)
    handle.detach()


def test_differences_are_taken_from_references_of_this_model_only(world: World) -> None:
    world(2).run(bad_references_raise_on_all)


# Loads on all ranks at once.


def load_while_others(what: str, scheme: Scheme[Any], loader: int) -> str:
    model, handle, saved = trained(scheme)
    with pytest.raises(gradsync.GroupError) as caught:
        if dist.get_rank() != loader:
            train(model)
        elif what == "gather":
            handle.checkpoint(gather=True).state_dict()
        elif what == "checkpoint":
            handle.checkpoint().load_state_dict(handle.checkpoint().state_dict())
        else:
            handle.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="stopped earlier"):
        train(model)
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "scheme", "loader"),
    [
        ("load", GATHERED, 1),
        ("load", AllReduce(), 0),
        ("load", TWO_WAY, 1),
        ("gather", GATHERED, 0),
        ("checkpoint", AllReduce(), 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_ranks_that_load_while_others_train_raise_and_so_do_these(
    world: World, what: str, scheme: Scheme[Any], loader: int
) -> None:
    for said in world(3).run(load_while_others, what, scheme, loader):
        assert re.search(rf"ing of (state|a checkpoint) began on rank {loader} while others train", said)


def load_while_others_average(what: str) -> str:
    """Loads, or takes the consensus, while an exchange of parameters goes on behind the step: all ranks are told."""
    torch.manual_seed(0)
    model = Perceptron()
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), AllReduce())], what=What.PARAMETER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, optimizer, plan, timeout=10)
    saved = handle.state_dict()
    with pytest.raises(gradsync.GroupError) as caught:
        if dist.get_rank() == 1 and what == "consensus":
            handle.consensus()
        elif dist.get_rank() == 1:
            handle.load_state_dict(saved)
        for _ in range(2):
            train(model)
            optimizer.step()
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize("what", ["loading of state", "consensus"])
def test_ranks_that_load_while_others_average_parameters_raise(world: World, what: str) -> None:
    for said in world(2).run(load_while_others_average, what):
        assert f"{what} began on rank 1" in said


def load_on_one_of_two_nodes() -> str:
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    try:
        torch.manual_seed(0)
        model = Perceptron()
        handle = gradsync.attach(model, timeout=10)
        train(model, 3)
        saved = handle.state_dict()
        assert handle._engine.group.placement.is_hierarchy
        with pytest.raises(gradsync.GroupError) as caught:
            if dist.get_rank() == 3:
                handle.load_state_dict(saved)
            else:
                train(model)
        handle.detach()
        return str(caught.value)
    finally:
        del os.environ["GROUP_RANK"]


def test_ranks_of_a_node_say_so_to_those_of_the_others(world: World) -> None:
    assert all("loading of state began on rank 3" in said for said in world(4).run(load_on_one_of_two_nodes))


def load_while_others_leave() -> str:
    _, handle, saved = trained()
    if dist.get_rank() == 0:
        handle.detach()
        dist.barrier()
        return ""
    with pytest.raises(gradsync.GroupError) as caught:
        handle.load_state_dict(saved)
    dist.barrier()  # else one of the two could have left, too, when the other looks
    handle.detach()
    return str(caught.value)


def test_ranks_that_load_when_others_have_left_raise(world: World) -> None:
    said = world(3).run(load_while_others_leave)
    assert all("rank 0 detached before loading of state, which all ranks must come to" in each for each in said[1:])


def load_alone(timeout_s: float) -> str:
    torch.manual_seed(0)
    handle = attached(Perceptron(), timeout=timeout_s)
    said = ""
    if dist.get_rank() == 1:
        with pytest.raises(gradsync.GroupError) as caught:
            handle.load_state_dict(handle.state_dict())
        said = str(caught.value)
    dist.barrier()
    handle.detach()
    return said


def test_a_rank_that_loads_alone_raises_after_the_timeout(world: World) -> None:
    said = world(3).run(load_alone, 0.5)
    assert "ranks 0, 2 did not come to loading of state within" in said[1]


def load_inside_a_step() -> str:
    model, handle, saved = trained()
    if dist.get_rank() == 1:
        parameter = next(model.parameters())
        parameter.register_post_accumulate_grad_hook(lambda _: handle.load_state_dict(saved))
    with pytest.raises((RuntimeError, gradsync.GroupError)) as caught:
        train(model)
        train(model)
    handle.detach()
    return str(caught.value)


def test_a_load_inside_a_step_raises_there_and_on_the_others(world: World) -> None:
    said = world(2).run(load_inside_a_step)
    assert "was called inside a step; call it between two steps, on every rank" in said[1]


def a_load_that_fails_midway() -> str:
    model, handle, saved = trained()
    original = BucketRun.take_over

    def take_over(self: BucketRun, state: Any) -> None:
        raise MemoryError("no room")

    if dist.get_rank() == 1:
        BucketRun.take_over = take_over
    try:
        with pytest.raises((MemoryError, gradsync.GroupError), match="no room") as caught:
            handle.load_state_dict(saved)
    finally:
        BucketRun.take_over = original
    with pytest.raises(RuntimeError, match="stopped earlier: .*no room"):
        train(model)
    handle.detach()
    return type(caught.value).__name__


def test_a_load_that_fails_midway_on_one_rank_raises_on_all(world: World) -> None:
    assert world(2).run(a_load_that_fails_midway) == ["GroupError", "MemoryError"]


def a_load_that_is_interrupted(where: str) -> str:
    """Interrupts a load as Ctrl-C or a signal's handler does, after which the script continues."""
    model, handle, saved = trained()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    owner: Any = {"take_over": BucketRun, "examined": engine_state}.get(where, handle._engine.group)
    original = getattr(owner, where)
    if dist.get_rank() == 1:
        setattr(owner, where, interrupt)
    try:
        with pytest.raises((KeyboardInterrupt, gradsync.GroupError)):
            handle.load_state_dict(saved)
    finally:
        setattr(owner, where, original)
    with pytest.raises(RuntimeError, match="stopped earlier: .*KeyboardInterrupt") as caught:
        train(model)
    if where == "take_over":
        with pytest.raises(RuntimeError, match="there is no whole state to save, as what changes it has failed midway"):
            handle.state_dict()
    else:
        require_same(handle, saved)
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize("where", ["take_over", "all_gather", "examined"])
def test_a_load_that_is_interrupted_on_one_rank_raises_on_all(world: World, where: str) -> None:
    said = world(3).run(a_load_that_is_interrupted, where)
    for each in (said[0], said[2]):
        assert all(words in each for words in ("loading of state", "rank 1: ", "KeyboardInterrupt")), said


def load_when_a_note_was_lost() -> None:
    """Leaves rank 1's first question to the store unanswered: the store takes no other one before the barrier."""
    _, handle, saved = trained()
    ask, lost = StoreClient.ask, []

    def forgetful(self: StoreClient, *arguments: Any, **settings: Any) -> Any:
        if not lost:
            lost.append(self)
            return None
        return ask(self, *arguments, **settings)

    if dist.get_rank() == 1:
        StoreClient.ask = forgetful
    try:
        handle.load_state_dict(saved)
    finally:
        StoreClient.ask = ask
    assert bool(lost) == (dist.get_rank() == 1)
    handle.detach()


def test_a_rank_whose_note_was_lost_says_again_that_it_has_come(world: World) -> None:
    world(3).run(load_when_a_note_was_lost)


def load_while_others_gather(loader: int, others: str) -> str:
    model, handle, saved = trained()
    parts = handle.checkpoint().state_dict()
    with pytest.raises(gradsync.GroupError) as caught:
        if dist.get_rank() == loader:
            handle.load_state_dict(saved)
        elif others == "gathering of state":
            handle.checkpoint(gather=True).state_dict()
        else:
            handle.checkpoint().load_state_dict(parts)
    with pytest.raises(RuntimeError, match="stopped earlier"):
        train(model)
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize(
    ("loader", "others"), [(0, "gathering of state"), (2, "gathering of state"), (1, "loading of a checkpoint")]
)
def test_ranks_that_load_while_others_gather_raise_and_so_do_these(world: World, loader: int, others: str) -> None:
    for said in world(3).run(load_while_others_gather, loader, others):
        assert "the ranks came to different things at the same time" in said
        assert f"loading of state on rank {loader}" in said and f"{others} on rank {2 if loader == 0 else 0}" in said


class Grown(nn.Module):
    """A module whose buffer grows between two forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def load_while_others_compare_buffers() -> str:
    torch.manual_seed(0)
    model = Grown()
    handle = attached(model)
    train(model)
    saved = handle.state_dict()
    with pytest.raises(gradsync.GroupError) as caught:
        if dist.get_rank() == 0:
            handle.load_state_dict(saved)
        else:
            model.seen = torch.zeros(5)
            train(model)
    handle.detach()
    return str(caught.value)


def test_ranks_that_load_while_others_compare_buffers_raise_and_so_do_these(world: World) -> None:
    for said in world(2).run(load_while_others_compare_buffers):
        assert "loading of state on rank 0, a comparison of buffers ('seen: 1 float32' became 'seen: 5 float" in said


def loads_between_steps_count_alike() -> None:
    """Runs steps, loads and gathers in turns on ranks that come late: they pair up in order."""
    model, handle, saved = trained(TWO_WAY)
    for number in range(4):
        if number % 3 == dist.get_rank():
            time.sleep(1.3)  # longer than a rank waits before it looks what the others do
        handle.load_state_dict(saved)
        handle.checkpoint(gather=True).load_state_dict(handle.checkpoint(gather=True).state_dict())
        train(model)
    assert handle.state_dict()["step"] == saved["step"] + 1
    handle.detach()


def test_ranks_that_come_late_to_a_load_are_waited_for(world: World) -> None:
    world(3).run(loads_between_steps_count_alike)


# Many parameters, and parameters with odd names.

ODD = ("tensor", "bytes", "a/b", "a[0:3]/sent", "a[0:6]", "ü☃", "new\nline", "rank 0", "a:momentum", "x]//y", "'\"\\")


class Named(nn.Module):
    """A module with parameters of these names, of six elements each."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.own = nn.ParameterDict({name: nn.Parameter(torch.randn(6)) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack(list(self.own.values())).sum(dim=0)


def odd_names_come_back(folder: str) -> None:
    torch.manual_seed(0)
    model = Named(ODD)
    handle = attached(model)
    train(model, 3)
    saved, parts = copy.deepcopy(handle.state_dict()), handle.checkpoint().state_dict()
    gradsync.state.save_file(saved, f"{folder}/{dist.get_rank()}")
    for state in (saved, gradsync.state.load_file(f"{folder}/{dist.get_rank()}"), None):
        train(model)
        if state is None:
            handle.checkpoint().load_state_dict(parts)
        else:
            handle.load_state_dict(state)
        require_same(handle, saved)
    handle.detach()


def test_parameters_of_any_name_have_their_state_back(world: World, tmp_path: Path) -> None:
    world(2).run(odd_names_come_back, str(tmp_path))


@pytest.mark.parametrize("scheme", [GATHERED, TWO_WAY, PowerSGD(1, min_compression=1.0)], ids=lambda each: each.name)
def test_the_work_of_a_load_grows_with_the_number_of_parameters_only(
    scheme: Scheme[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[int] = Counter()
    size = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            looks[size] += 1
            return function(*arguments)

        return call

    for name in ("overlaps", "overlap", "copy_to"):
        monkeypatch.setattr(StateSlice, name, counted(getattr(StateSlice, name)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for size in (10, 200):
            model = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(size))
            handle = attached(model, scheme)
            torch.stack([p.square().sum() for p in model]).sum().backward()
            saved = handle.state_dict()
            handle.load_state_dict(saved)
            handle.detach()
            handle = attached(model, AllReduce())  # which carries it
            residuals = {key: values for key, values in saved["state"].items() if key.endswith(".residual")}
            handle.load_state_dict({**saved, "state": residuals})
            handle.detach()
    finally:
        dist.destroy_process_group()
    assert 0 < looks[200] <= 25 * looks[10]
