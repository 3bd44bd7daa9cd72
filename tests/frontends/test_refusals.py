"""Bad input gives an error on every rank, the same one where possible, and never a hang."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.devices import streams
from gradsync.frontends.agreement import FSDP, PART_IN_SHARDS, why_not_replicas
from gradsync.schemes import AllReduce
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.frontends.models import Checkpointed, HiddenTable, Perceptron, Tables
from tests.world import Ranks

World = Callable[[int], Ranks]


def message(function: Callable[[], Any]) -> str:
    """Returns the error of `function`; afterwards a good model must still attach."""
    try:
        function()
    except (ValueError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("nothing was raised")
    gradsync.attach(Perceptron(), timeout=10).detach()
    return text


def specs_of(model: nn.Module) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}


def attach_differing(kind: str) -> str:
    """Attaches models of which rank 1's differs in one respect."""
    odd = dist.get_rank() == 1
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    if kind == "shape" and odd:
        model[2] = nn.Linear(4, 5)
    elif kind == "name" and odd:
        model.register_parameter("extra", model[2].bias)
        del model[2].bias
        model[2].register_parameter("bias", None)
    elif kind == "dtype" and odd:
        model[2].double()
    elif kind == "count" and odd:
        model.append(nn.Linear(1, 1))
    elif kind == "frozen":
        model[0].requires_grad_(False)
        if odd:
            model[0] = nn.Linear(7, 4).requires_grad_(False)
    elif kind == "requires_grad" and odd:
        model[0].weight.requires_grad_(False)
    elif kind == "buffer":
        model.register_buffer("table", torch.zeros(3 if odd else 2))
    return message(lambda: gradsync.attach(model, timeout=10))


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("shape", "'2.weight: 2x4 float32', rank 1 has '2.weight: 5x4 float32'"),
        ("name", "'0.weight: 4x3 float32', rank 1 has 'extra: 2 float32'"),
        ("dtype", "'2.weight: 2x4 float32', rank 1 has '2.weight: 2x4 float64'"),
        ("count", "'1.running_mean: 4 float32 (buffer)', rank 1 has '3.weight: 1x1 float32'"),
        ("requires_grad", "'0.weight: 4x3 float32', rank 1 has '0.bias: 4 float32'"),
        ("frozen", "'0.weight: 4x3 float32 (frozen)', rank 1 has '0.weight: 4x7 float32 (frozen)'"),
        ("buffer", "'table: 2 float32 (buffer)', rank 1 has 'table: 3 float32 (buffer)'"),
    ],
)
def test_different_models_raise_on_all_ranks_with_both_digests_and_the_difference(
    world: World, kind: str, difference: str
) -> None:
    texts = world(3).run(attach_differing, kind)
    assert len(set(texts)) == 1
    assert re.search(r"differ between the ranks: rank 0 has [0-9a-f]{12}, rank 1 has [0-9a-f]{12}", texts[0]), texts[0]
    assert difference in texts[0]


def attach_with_differing_plans() -> str:
    model = Perceptron()
    specs = specs_of(model)
    names = list(specs)
    split = [(names[:3], AllReduce()), (names[3:], AllReduce())]
    plan = Plan.make(specs, 2, [(names, AllReduce())] if dist.get_rank() == 0 else split)
    return message(lambda: gradsync.attach(model, plan=plan, timeout=10))


def attach_with_a_plan_on_one_rank() -> str:
    model = Perceptron()
    plan = Plan.make(specs_of(model), 2, [(list(specs_of(model)), AllReduce())]) if dist.get_rank() == 0 else None
    return message(lambda: gradsync.attach(model, plan=plan, timeout=10))


def attach_with_planners_that_differ() -> str:
    def planner(profiles: Any, size: int) -> Plan:
        names = [p.name for p in profiles]
        if dist.get_rank() == 1:
            names.reverse()
        return Plan.make({p.name: p.tensor for p in profiles}, size, [(names, AllReduce())])

    return message(lambda: gradsync.attach(Perceptron(), plan=planner, timeout=10))


@pytest.mark.parametrize(
    "function", [attach_with_differing_plans, attach_with_a_plan_on_one_rank, attach_with_planners_that_differ]
)
def test_different_plans_raise_on_all_ranks(world: World, function: Callable[[], str]) -> None:
    texts = world(2).run(function)
    assert texts[0] == texts[1]
    assert "ValueError: the plans differ between the ranks: rank 0 has" in texts[0]


def attach_behind_a_ddp_that_skips_buckets() -> str:
    model = DistributedDataParallel(Perceptron(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    return message(lambda: gradsync.attach(model, timeout=10))


def test_a_ddp_that_skips_buckets_is_refused(world: World) -> None:
    for text in world(2).run(attach_behind_a_ddp_that_skips_buckets):
        assert text.startswith("ValueError: ") and "skip_all_reduce_unused_params" in text


def planner_fails_on_rank_1() -> str:
    def planner(profiles: Any, size: int) -> Plan:
        if dist.get_rank() == 1:
            raise ValueError("no idea")
        return Plan.make({p.name: p.tensor for p in profiles}, size, [([p.name for p in profiles], AllReduce())])

    return message(lambda: gradsync.attach(Perceptron(), plan=planner, timeout=10))


def test_a_planner_that_fails_on_one_rank_raises_on_all(world: World) -> None:
    texts = world(2).run(planner_fails_on_rank_1)
    assert texts == ["RuntimeError: rank 1 could not attach: no idea", "ValueError: no idea"]


def attach_wrongly(kind: str) -> str:
    """Attaches with one kind of wrong arguments, the same on all ranks."""
    model: nn.Module = Perceptron()
    size = dist.get_world_size()
    specs = specs_of(model)
    names = list(specs)
    whole = [(name, 0, specs[name].numel) for name in names]
    arguments: dict[str, Any] = {}
    if kind == "world":
        arguments["plan"] = Plan.make(specs, size + 1, [(names, AllReduce())])
    elif kind == "unknown":
        haunted = specs | {"ghost": TensorSpec((2,), torch.float32)}
        arguments["plan"] = Plan.make(haunted, size, [(list(haunted), AllReduce())])
    elif kind == "overlap":
        arguments["plan"] = Plan.make(specs, size, [([*whole, ("layers.0.weight", 3, 5)], AllReduce())])
    elif kind == "incomplete":
        arguments["plan"] = Plan.make(specs, size, [(names[1:], AllReduce())])
    elif kind == "complex":
        model.register_parameter("wave", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    elif kind == "exclude":
        arguments["exclude"] = ["layer.*"]
    elif kind == "fsdp":

        class FullyShardedDataParallel(nn.Module):
            """A class with the name of FSDP's: gradsync looks at the name only, to avoid the import."""

        model.inner = FullyShardedDataParallel()
    elif kind == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.layers, mesh=init_device_mesh("cpu", (size,)))
    elif kind == "dtensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        mesh = init_device_mesh("cpu", (size,))
        model.register_parameter("sharded", nn.Parameter(distribute_tensor(torch.zeros(4), mesh)))
    return message(lambda: gradsync.attach(model, timeout=10, **arguments))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("world", "ValueError: the plan is for 3 ranks, this job has 2; make a plan for it"),
        ("unknown", "ValueError: bucket '0' names 'ghost', which is no parameter to synchronise here"),
        ("overlap", "ValueError: the plan's segments of 'layers.0.weight' overlap: [3, 5) begins before 48"),
        ("incomplete", "ValueError: the plan leaves elements [0, 1) of 'scale' out; every parameter needs a bucket"),
        ("complex", "ValueError: 'wave' is complex (torch.complex64), which is not supported; exclude it"),
        ("exclude", "ValueError: exclude names 'layer.*', which no parameter or buffer of the model matches"),
        ("fsdp", f"RuntimeError: {FSDP}"),
        ("fully_shard", f"RuntimeError: {PART_IN_SHARDS}"),
        ("dtensor", "RuntimeError: 'sharded' is a DTensor (FSDP2 or tensor parallel), which is not supported yet"),
    ],
)
def test_a_wrong_attach_says_what_is_wrong_on_all_ranks(world: World, kind: str, expected: str) -> None:
    assert world(2).run(attach_wrongly, kind) == [expected] * 2


def attach_parts(attribute: str, value: Any) -> list[str]:
    """Attaches a model with a marked parameter: alone, among ranks that the caller names, excluded, and behind DDP."""
    model = Perceptron()
    setattr(model.scale, attribute, value)
    begins = dist.get_rank() * torch.ones_like(model.scale)
    with torch.no_grad():
        model.scale.copy_(begins)
    text = message(lambda: gradsync.attach(model, timeout=10))
    gradsync.attach(model, exclude=["scale"], timeout=10).detach()
    assert torch.equal(model.scale, begins), "nothing was overwritten"
    gradsync.attach(model, process_group=dist.group.WORLD, timeout=10).detach()
    gradsync.attach(DistributedDataParallel(model), timeout=10).detach()
    return text


@pytest.mark.parametrize(
    ("attribute", "value", "whose"),
    [
        ("tensor_model_parallel", True, "Megatron-LM's tensor parallelism"),
        ("allreduce", False, "Megatron-LM's expert parallelism"),
        ("ds_id", 0, "DeepSpeed's ZeRO-3"),
    ],
)
def test_parts_of_other_libraries_are_not_taken_for_replicas(
    world: World, attribute: str, value: Any, whose: str
) -> None:
    for text in world(2).run(attach_parts, attribute, value):
        assert text.startswith(f"ValueError: 'scale' is marked (by its attribute {attribute}) as a part under {whose}")


@pytest.mark.parametrize(("attribute", "value"), [("tensor_model_parallel", False), ("allreduce", True)])
def test_marks_of_whole_parameters_are_let_pass(attribute: str, value: bool) -> None:
    model = Perceptron()
    setattr(model.scale, attribute, value)
    assert why_not_replicas(model, []) == ""


def attach_wrongly_on_rank_1() -> str:
    exclude = ["absent"] if dist.get_rank() == 1 else []
    return message(lambda: gradsync.attach(Perceptron(), exclude=exclude, timeout=10))


def test_what_is_wrong_on_one_rank_only_raises_on_all(world: World) -> None:
    reason = "exclude names 'absent', which no parameter or buffer of the model matches"
    expected = [f"RuntimeError: rank 1 could not attach: {reason}", f"ValueError: {reason}"]
    assert world(2).run(attach_wrongly_on_rank_1) == expected


def attach_again(kind: str) -> str:
    model = Perceptron()
    handle = gradsync.attach(model, timeout=10)
    again = {"same": model, "part": model.layers, "around": nn.Sequential(model)}[kind]
    text = message(lambda: gradsync.attach(again, timeout=10))
    handle.detach()
    gradsync.attach(again, timeout=10).detach()
    return text


@pytest.mark.parametrize("kind", ["same", "part", "around"])
def test_attaching_twice_is_refused_until_detach(world: World, kind: str) -> None:
    (text,) = set(world(2).run(attach_again, kind))
    assert "gradsync is attached to this model, or to a part of it, already; call detach() on it first" in text
    assert "gradsync.attachment_of(model)" in text


def attach_during_backward() -> str:
    texts = []

    def attach(gradient: Tensor) -> None:
        try:
            gradsync.attach(Perceptron(), timeout=10)
        except RuntimeError as error:
            texts.append(str(error))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(attach)
    x.sum().backward()
    return texts[0]


def test_attach_during_backward_is_refused(world: World) -> None:
    (text,) = set(world(2).run(attach_during_backward))
    assert "attach() was called during backward; call it before the forward of a step" in text


def train_inside_a_capture() -> tuple[str, bool]:
    """A backward that a CUDA graph would capture, and one behind it."""
    model = nn.Linear(3, 2)
    gradsync.attach(model, timeout=20)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    with patch.object(streams, "is_capturing", lambda device: True):
        text = message(lambda: model(x).sum().backward())
    model.zero_grad()
    model(x).sum().backward()
    expected = x.sum(0).repeat(2, 1)
    dist.all_reduce(expected)
    assert model.weight.grad is not None
    return text, torch.allclose(model.weight.grad, expected / dist.get_world_size())


def test_the_capture_of_a_graph_is_refused_and_harms_nothing(world: World) -> None:
    for text, goes_on in world(2).run(train_inside_a_capture):
        assert "make_graphed_callables(model, ...) before attach()" in text and goes_on


def reentrant_checkpointing() -> str:
    model = Checkpointed(reentrant=True)
    handle = gradsync.attach(model, timeout=10)

    def step() -> None:
        model(torch.randn(4, 6, requires_grad=True)).mean().backward()

    text = message(step)
    handle.detach()
    return text


def test_reentrant_checkpointing_is_refused_with_the_remedy(world: World) -> None:
    for text in world(2).run(reentrant_checkpointing):
        assert "use_reentrant=False" in text


def test_attach_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first.*attach after it"):
        gradsync.attach(Perceptron())


def attach_from_outside_of_the_group() -> str:
    group = dist.new_group([0])
    try:
        gradsync.attach(Perceptron(), process_group=group, timeout=10).detach()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "attached"


def test_a_rank_outside_of_the_process_group_is_told_so(world: World) -> None:
    inside, outside = world(2).run(attach_from_outside_of_the_group)
    assert inside == "attached"
    assert outside == "this rank is not a member of process_group; call attach() on its members only"


def rows_out_of_range(scheme: str) -> str:
    model = Tables() if scheme == "announced" else HiddenTable()
    table = model.words.weight if scheme == "announced" else model.table
    handle = gradsync.attach(model, timeout=10)
    model(torch.randint(20, (2, 3))).sum().backward()

    def wrong(gradient: Tensor) -> Tensor:
        indices = torch.tensor([[1, table.shape[0] + 3]])
        values = torch.ones(2, *table.shape[1:])
        return torch.sparse_coo_tensor(indices, values, table.shape, check_invariants=False)

    if dist.get_rank() == 1:
        table.register_hook(wrong)
    model.zero_grad()

    def step() -> None:
        model(torch.randint(20, (2, 3))).sum().backward()

    text = message(step)
    assert "stopped earlier" in message(step)
    handle.detach()
    return text


@pytest.mark.parametrize("scheme", ["announced", "hidden"])
def test_rows_out_of_range_on_one_rank_raise_on_all(world: World, scheme: str) -> None:
    texts = world(2).run(rows_out_of_range, scheme)
    for text in texts:
        assert re.search(r"index (33|28) .* is outside \[0, num_rows=(30|25)\)", text), text


def step_without_pickle() -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an object was pickled")

    model = Tables()
    with patch.object(pickle, "dumps", refuse), patch.object(distributed_c10d, "_object_to_tensor", refuse):
        handle = gradsync.attach(model, timeout=10)
        for _ in range(2):
            model(torch.randint(20, (2, 3))).sum().backward()
        handle.detach()


def test_nothing_is_pickled_for_the_wire(world: World) -> None:
    world(2).run(step_without_pickle)
