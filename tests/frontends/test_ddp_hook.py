"""gradsync as DDP's communication hook gives the gradients of DDP without a hook."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.schemes import AllReduce, CompressedAllGather, Scheme
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.frontends.models import Branches, Perceptron, Tables
from tests.frontends.twins import Twin, assert_same_gradients, assert_same_on_all_ranks, assert_same_weights, plain
from tests.quick import quickly
from tests.world import Ranks, new_oracle_group

World = Callable[[int], Ranks]

SMALL_BUCKETS = {"bucket_cap_mb": 0.0001}  # a bucket for nearly every parameter, laid out anew after the first step


def twins(make: Callable[[], nn.Module], plan: Plan | None = None, **options: Any) -> tuple[Twin, Twin]:
    """Returns (DDP alone, DDP with gradsync's hook)."""
    made = []
    for group in (new_oracle_group(), None):
        torch.manual_seed(dist.get_rank())
        module = make()
        ddp = DistributedDataParallel(module, process_group=group, **options)
        made.append(Twin(module, ddp, plain(list(module.parameters())), ddp.no_sync))
    made[1].handle = gradsync.attach(made[1].model, plan=plan, timeout=10)
    return made[0], made[1]


def compare(pair: tuple[Twin, Twin], step: Callable[[Twin, int], None], steps: int = 4) -> None:
    for number in range(steps):
        for twin in pair:
            torch.manual_seed(100 * number + dist.get_rank())
            twin.optimizer.zero_grad()
            step(twin, number)
            twin.optimizer.step()
        assert_same_gradients(pair[0].gradients(), pair[1].gradients(), f"after step {number}")
    assert_same_weights(*pair)


def dense_step(twin: Twin, number: int) -> None:
    twin.model(torch.randn(4, 6)).square().mean().backward()


def branch_step(twin: Twin, number: int) -> None:
    taken = ((number + dist.get_rank()) % 2,)
    twin.model(torch.randn(4, 6), taken).square().mean().backward()


def sparse_step(twin: Twin, number: int) -> None:
    twin.model(torch.randint(30, (4, 5))).square().mean().backward()


def accumulating_step(twin: Twin, number: int) -> None:
    for micro in range(3):
        with nullcontext() if micro == 2 else twin.no_sync():
            twin.model(torch.randn(4, 6)).square().mean().backward()


STEPS = {"dense": dense_step, "branch": branch_step, "sparse": sparse_step, "accumulating": accumulating_step}


def run(make: Callable[[], nn.Module], step: str, options: dict[str, Any]) -> None:
    pair = twins(make, **options)
    compare(pair, STEPS[step])
    pair[1].handle.detach()
    compare(pair, STEPS[step])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("make", "step", "options"),
    [
        (Perceptron, "dense", {}),
        (Perceptron, "dense", SMALL_BUCKETS),
        (Perceptron, "dense", {"gradient_as_bucket_view": True, **SMALL_BUCKETS}),
        (Perceptron, "dense", {"static_graph": True, **SMALL_BUCKETS}),
        (Perceptron, "accumulating", SMALL_BUCKETS),
        (Branches, "branch", {"find_unused_parameters": True, **SMALL_BUCKETS}),
        (Tables, "sparse", SMALL_BUCKETS),
        (Tables, "sparse", {"find_unused_parameters": True}),
    ],
)
def test_gradients_are_ddps_attached_and_after_detach(
    world: World, make: Callable[[], nn.Module], step: str, options: dict[str, Any], size: int
) -> None:
    world(size).run(run, make, step, options)


def cut_across() -> None:
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(Perceptron()).items()}
    cut = "layers.2.weight"
    others = [(name, 0, spec.numel) for name, spec in specs.items() if name != cut]
    parts = [[*others[::2], (cut, 0, 20)], [*others[1::2], (cut, 20, 50)], [(cut, 50, 64)]]
    plan = Plan.make(specs, dist.get_world_size(), [(part, AllReduce()) for part in parts])
    pair = twins(Perceptron, plan, **SMALL_BUCKETS)
    compare(pair, dense_step)
    assert pair[1].handle.plan == plan
    pair[1].handle.detach()


def test_buckets_of_a_plan_may_cut_across_ddps(world: World) -> None:
    world(2).run(cut_across)


def cut_table() -> None:
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(Tables()).items()}
    others = [(name, 0, spec.numel) for name, spec in specs.items() if name != "words.weight"]
    cuts = [[("words.weight", 0, 67)], [*others, ("words.weight", 67, 150)]]
    plan = Plan.make(specs, dist.get_world_size(), [(cut, AllReduce()) for cut in cuts])
    compare(twins(Tables, plan=plan), sparse_step)


def test_a_plan_may_cut_a_table(world: World) -> None:
    world(2).run(cut_table)


FLAT: dict[str, list[list[tuple[str, int, int]]]] = {
    "whole": [[("weight", 0, 42)]],
    "cut": [[("weight", 0, 10)], [("weight", 10, 25)], [("weight", 25, 42)]],
}


def sparse_adam(parts: list[list[tuple[str, int, int]]], scheme: Scheme[Any]) -> None:
    """Trains a table by an optimiser that takes sparse gradients only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lossy, found = not scheme.traits.exact, []
    for way in ("oracle", "hook", "attach", "class"):
        model: nn.Module = nn.Embedding(14, 3, sparse=True)
        with torch.no_grad():
            model.weight.copy_(torch.arange(42.0).view(14, 3))
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        plan = Plan.make({"weight": TensorSpec.of(model.weight)}, size, [(part, scheme) for part in parts])
        table = model
        if way in ("oracle", "hook"):
            model = DistributedDataParallel(model, process_group=new_oracle_group() if way == "oracle" else None)
        if way == "class":
            model = gradsync.DistributedDataParallel(model, plan=plan, timeout=15)
        handle = gradsync.attach(model, plan=plan, timeout=15) if way in ("hook", "attach") else None
        for step in range(3):
            ids = torch.randint(14, (5,), generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            assert table.weight.grad.layout is torch.sparse_coo, (way, step)
            optimizer.step()
        found.append(table.weight.detach())
        if handle is not None:
            handle.detach()
    for other in found[2:] if lossy else found:
        torch.testing.assert_close(other, found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", FLAT.values(), ids=FLAT)
@pytest.mark.parametrize("scheme", [AllReduce(), CompressedAllGather(ErrorFeedback(TopK(0.3)))], ids=["mean", "lossy"])
def test_a_sparse_gradient_stays_sparse_whatever_the_plan(
    world: World, parts: list[list[tuple[str, int, int]]], scheme: Scheme[Any]
) -> None:
    world(2).run(sparse_adam, parts, scheme)


def state_by_index() -> None:
    """Compares state with that of `attach`, which is in the order of indices whatever the memory format."""
    kept = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
        scheme = CompressedAllGather(ErrorFeedback(TopK(0.3)))
        plan = Plan.make(specs, dist.get_world_size(), [(list(specs), scheme)])
        model = DistributedDataParallel(model) if wrapped else model
        handle = gradsync.attach(model, plan=plan, timeout=15)
        model(torch.randn(2, 3, 4, 4)).square().mean().backward()
        kept.append(handle.state_dict()["state"]["weight[0:48]/sent.residual"])
        handle.detach()
    assert kept[0].any() and torch.equal(*kept)


def test_state_is_in_the_order_of_indices_whatever_the_memory_format(world: World) -> None:
    world(2).run(state_by_index)


def registered_by_hand() -> None:
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(Perceptron())
    ddp.register_comm_hook(gradsync.DDPState(ddp, timeout_s=10), gradsync.ddp_hook)
    torch.manual_seed(dist.get_rank())
    plain_ddp = DistributedDataParallel(Perceptron())
    for number in range(3):
        gradients = []
        for model in (plain_ddp, ddp):
            torch.manual_seed(number * 10 + dist.get_rank())
            model.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            gradients.append({name: p.grad for name, p in model.module.named_parameters()})
        assert_same_gradients(*gradients, f"after step {number}")


def test_the_hook_is_registered_as_any_other(world: World) -> None:
    world(2).run(registered_by_hand)


@quickly()
def before_the_model() -> None:
    """Makes the state before the model and without process groups, as frameworks that wrap models in DDP do."""
    for state in (gradsync.DDPState(timeout_s=15), gradsync.DDPState(plan="auto", timeout_s=15, exclude=["scale"])):
        with pytest.raises(RuntimeError, match="this DDPState has no model yet"):
            _ = state.engine
        torch.manual_seed(dist.get_rank())
        ddp = DistributedDataParallel(Perceptron(), **SMALL_BUCKETS)
        ddp.register_comm_hook(state, gradsync.ddp_hook)
        for number in range(3):
            torch.manual_seed(number * 10 + dist.get_rank())
            ddp.zero_grad()
            ddp(torch.randn(4, 6)).square().mean().backward()
        gradients = {name: p.grad for name, p in ddp.module.named_parameters()}
        excluded = "scale" not in state.engine.parameters
        if excluded:
            gradients.pop("scale")
        assert_same_on_all_ranks(gradients)
        assert state.engine.step == 3
        assert state.model is ddp


def test_a_state_may_be_made_before_the_model(world: World) -> None:
    world(2).run(before_the_model)


def unlike_plans() -> str:
    ddp = DistributedDataParallel(Perceptron())
    ddp.register_comm_hook(gradsync.DDPState(plan=None if dist.get_rank() else "auto", timeout_s=15), gradsync.ddp_hook)
    try:
        ddp(torch.randn(4, 6)).mean().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing raised"


def test_a_state_that_does_not_fit_raises_on_all_ranks_in_the_first_backward(world: World) -> None:
    for text in world(2).run(unlike_plans):
        assert "the plans differ between the ranks" in text


def wrong_states() -> None:
    ddp = DistributedDataParallel(Perceptron())
    ddp.register_comm_hook(None, gradsync.ddp_hook)
    with pytest.raises((TypeError, RuntimeError), match="needs a gradsync.DDPState as its state, got None"):
        ddp(torch.randn(4, 6)).mean().backward()
    state = gradsync.DDPState(timeout_s=15)
    models = [DistributedDataParallel(Perceptron()) for _ in range(2)]
    for model in models:
        model.register_comm_hook(state, gradsync.ddp_hook)
    with pytest.raises(RuntimeError, match="2 DDP models were found"):
        models[0](torch.randn(4, 6)).mean().backward()
    state = gradsync.DDPState(models[0], timeout_s=15)
    other = DistributedDataParallel(Perceptron())
    other.register_comm_hook(state, gradsync.ddp_hook)
    with pytest.raises(RuntimeError, match="give each DDP model its own DDPState"):
        other(torch.randn(4, 6)).mean().backward()
    state.detach()


def test_states_that_are_none_or_of_another_model_are_refused(world: World) -> None:
    world(2).run(wrong_states)


def copies() -> None:
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(Perceptron())
    handle = gradsync.attach(ddp, timeout=15)
    lazily = DistributedDataParallel(Perceptron())
    lazily.register_comm_hook(gradsync.DDPState(timeout_s=15), gradsync.ddp_hook)
    for model in (ddp, lazily):
        for trained in range(2):
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                again = gradsync.attach(copied, timeout=15)
                copied(torch.randn(4, 6)).mean().backward()
                assert_same_on_all_ranks({name: p.grad for name, p in copied.named_parameters()})
                assert sum(bucket.steps for bucket in again.statistics()) > 0
                again.detach()
            if not trained:
                model(torch.randn(4, 6)).mean().backward()
    handle.detach()


def test_a_hooked_model_is_copied_and_pickled(world: World) -> None:
    world(2).run(copies)


def wrap_again() -> None:
    """Wraps a model again while its old wrapper lives on with DDP's own all-reduce."""
    module = Perceptron()
    models = []
    for number in range(3):
        model = DistributedDataParallel(module)
        model.register_comm_hook(gradsync.DDPState(timeout_s=15), gradsync.ddp_hook)
        models.append(model)
        module.zero_grad()
        torch.manual_seed(number * 10 + dist.get_rank())
        model(torch.randn(4, 6)).mean().backward()
        assert_same_on_all_ranks({name: p.grad for name, p in module.named_parameters()})
    nested = DistributedDataParallel(models[-1])
    nested.register_comm_hook(gradsync.DDPState(timeout_s=15), gradsync.ddp_hook)
    module.zero_grad()
    nested(torch.randn(4, 6)).mean().backward()
    assert_same_on_all_ranks({name: p.grad for name, p in module.named_parameters()})
    del model, models, nested
    gc.collect()
    gradsync.attach(module, timeout=15).detach()


def test_a_model_may_be_wrapped_again(world: World) -> None:
    world(2).run(wrap_again)


def attach_again() -> None:
    ddp = DistributedDataParallel(Perceptron())
    handle = gradsync.attach(ddp, timeout=10)
    for model in (ddp, ddp.module):
        with pytest.raises(RuntimeError, match="gradsync is attached to this model, or to a part of it, already"):
            gradsync.attach(model, timeout=10)
    handle.detach()
    handle = gradsync.attach(ddp, timeout=10)
    ddp(torch.randn(4, 6)).mean().backward()
    assert [bucket.steps for bucket in handle.statistics()] == [1]
    assert_same_on_all_ranks({name: p.grad for name, p in ddp.named_parameters()})
    handle.detach()


def test_attaching_again_takes_a_detach(world: World) -> None:
    world(2).run(attach_again)


def raise_in_backward() -> str:
    """Raises late in backward: DDP reports nothing before its first bucket is ready."""
    ddp = DistributedDataParallel(Perceptron(), **SMALL_BUCKETS)
    handle = gradsync.attach(ddp, timeout=60)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("a bad sample")

    ddp(torch.randn(4, 6)).mean().backward()
    if dist.get_rank() == 1:
        ddp.module.layers[0].weight.register_hook(fail)
    try:
        ddp(torch.randn(4, 6)).mean().backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        handle.detach()
    return "nothing raised"


def test_a_rank_that_raises_in_backward_tells_the_others(world: World) -> None:
    failed, told = reversed(world(2).run(raise_in_backward, limit_s=30))
    assert failed == "a bad sample"
    assert "rank 1: " in told
    assert "step 1" in told
