"""DDP is the oracle: two copies of a model have the same `param.grad`, bit by bit on two ranks.

Each case is a function that runs on every rank; DDP runs with `find_unused_parameters=True` where it needs that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync import Plan
from gradsync.schemes import (
    DOUBLING_OF_ELEMENTS,
    DOUBLING_OF_ROWS,
    Aggregation,
    AGSparse,
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    Communication,
    RowPoint,
    Scheme,
    SparseReduceScatter,
)
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.frontends.models import (
    Branches,
    Checkpointed,
    Convolutions,
    MixedPrecision,
    Perceptron,
    Recursive,
    Tables,
    TiedTable,
)
from tests.frontends.twins import (
    Twin,
    assert_same_gradients,
    assert_same_weights,
    compare_with_ddp,
    detach,
    follow,
    make_twins,
    momentum,
)
from tests.world import Ranks

World = Callable[[int], Ranks]

UNUSED = {"find_unused_parameters": True}


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 6).to(dtype)


def ids(table: int, count: int = 7) -> torch.Tensor:
    return torch.randint(table, (4, count))


def train_step(twin: Twin, number: int, *, set_to_none: bool = True, dtype: torch.dtype = torch.float32) -> None:
    twin.optimizer.zero_grad(set_to_none=set_to_none)
    twin.model(rows(dtype)).square().mean().backward()
    twin.optimizer.step()


# Dense models.


def zero_grad_to_none() -> None:
    compare_with_ddp(Perceptron, train_step, optimizer=momentum)


def zero_grad_to_zero() -> None:
    compare_with_ddp(Perceptron, partial(train_step, set_to_none=False), optimizer=momentum)


def gradients_never_zeroed() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.model(rows()).square().mean().backward()

    compare_with_ddp(Perceptron, step)


def bfloat16() -> None:
    compare_with_ddp(partial(Perceptron, torch.bfloat16), partial(train_step, dtype=torch.bfloat16))


def float16() -> None:
    compare_with_ddp(partial(Perceptron, torch.float16), partial(train_step, dtype=torch.float16))


def float64() -> None:
    compare_with_ddp(partial(Perceptron, torch.float64), partial(train_step, dtype=torch.float64))


def several_dtypes() -> None:
    compare_with_ddp(MixedPrecision, train_step)


def adam() -> None:
    compare_with_ddp(Perceptron, train_step, steps=6, optimizer=partial(torch.optim.AdamW, lr=0.01))


def gradients_clipped() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        (twin.model(rows()).square().mean() * 100).backward()
        norm = nn.utils.clip_grad_norm_(twin.module.parameters(), 0.1)
        assert norm > 0.1
        twin.optimizer.step()

    compare_with_ddp(Perceptron, step, optimizer=momentum)


def channels_last_and_batch_norm() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(torch.randn(2, 2, 6, 6)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Convolutions, step)


def a_model_that_calls_itself() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(rows(), 1 + (number + dist.get_rank()) % 3).square().mean().backward()
        twin.optimizer.step()

    twins = make_twins(Recursive)
    follow(twins, step, steps=4)
    for (name, ours), oracles in zip(twins[1].module.named_buffers(), twins[0].module.buffers(), strict=True):
        assert torch.equal(ours, oracles), f"{name}: buffers are rank 0's once a step"
    detach(twins)


def evaluation_in_between() -> None:
    def step(twin: Twin, number: int) -> None:
        train_step(twin, number)
        with torch.no_grad():
            twin.model(rows())
        twin.module.eval()
        with torch.no_grad():
            twin.model(rows())
        twin.module.train()

    compare_with_ddp(Perceptron, step)


def losses_of_several_scales() -> None:
    """Makes one rank do much more work before backward, so ranks wait for each other at different places."""

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        if dist.get_rank() == number % 2:
            torch.randn(200, 200) @ torch.randn(200, 200)
        (twin.model(rows()).mean() * 10**number).backward()
        twin.optimizer.step()

    compare_with_ddp(Perceptron, step)


# Accumulation.


def accumulate(twin: Twin, number: int, *, zero: bool, taken: Callable[[int], tuple[int, ...]] | None = None) -> None:
    if zero:
        twin.optimizer.zero_grad()
    for micro in range(3):
        with nullcontext() if micro == 2 else twin.no_sync():
            x = rows()
            output = twin.model(x) if taken is None else twin.model(x, taken(micro))
            output.square().mean().backward()
    twin.optimizer.step()


def micro_batches() -> None:
    compare_with_ddp(Perceptron, partial(accumulate, zero=True))


def micro_batches_never_zeroed() -> None:
    compare_with_ddp(Perceptron, partial(accumulate, zero=False), optimizer=momentum)


def micro_batches_that_use_other_branches() -> None:
    """Uses a branch only in a local micro-batch of one rank: the synchronising backward still counts it as used."""

    def taken(micro: int) -> tuple[int, ...]:
        return (0,) if micro == 0 and dist.get_rank() == 0 else (1,)

    compare_with_ddp(Branches, partial(accumulate, zero=True, taken=taken), **UNUSED)


def micro_batches_that_use_other_branches_everywhere() -> None:
    compare_with_ddp(
        Branches, partial(accumulate, zero=True, taken=lambda micro: (0,) if micro < 2 else (1,)), **UNUSED
    )


def sparse_micro_batches() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        for micro in range(3):
            with nullcontext() if micro == 2 else twin.no_sync():
                twin.model(ids(30)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Tables, step)


# Unused parameters.


def unused_everywhere() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(rows(), (0,)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Branches, step, **UNUSED)


def unused_on_some_ranks() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad(set_to_none=number % 2 == 0)
        taken = (dist.get_rank() % 2,) if number != 2 else (0, 1)
        twin.model(rows(), taken).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Branches, step, steps=5, **UNUSED)


def unused_after_it_was_used() -> None:
    """Leaves a gradient that no rank renews at its value, bit by bit."""

    def step(twin: Twin, number: int) -> None:
        if number == 0:
            twin.optimizer.zero_grad()
        twin.model(rows(), (0, 1) if number == 0 else (0,)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Branches, step, steps=5, **UNUSED)


def unused_in_turns_never_zeroed() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.model(rows(), ((number + dist.get_rank()) % 3,)).sum().backward()

    def make() -> Branches:
        model = Branches()
        model.shared.requires_grad_(False)
        return model

    compare_with_ddp(make, step, steps=5, **UNUSED)


def frozen_after_attach_and_unfrozen() -> None:
    def step(twin: Twin, number: int) -> None:
        frozen = number in (1, 2)
        twin.module.layers[2].requires_grad_(not frozen)
        train_step(twin, number, set_to_none=number != 2)

    compare_with_ddp(Perceptron, step, steps=5, optimizer=momentum, **UNUSED)


def frozen_before_attach() -> None:
    def make() -> nn.Module:
        model = Perceptron()
        model.layers[0].requires_grad_(False)
        return model

    compare_with_ddp(make, train_step)


def frozen_with_gradients_of_local_micro_batches() -> None:
    """Freezes a parameter between a local and the synchronising micro-batch: DDP averages what was accumulated."""

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        with twin.no_sync():
            twin.model(rows()).square().mean().backward()
        twin.module.layers[2].requires_grad_(False)
        twin.model(rows()).square().mean().backward()
        twin.module.layers[2].requires_grad_(True)
        twin.optimizer.step()

    compare_with_ddp(Perceptron, step, **UNUSED)


# Sparse gradients.


def table_step(twin: Twin, number: int, *, set_to_none: bool = True) -> None:
    twin.optimizer.zero_grad(set_to_none=set_to_none)
    twin.model(ids(30)).square().mean().backward()
    twin.optimizer.step()


def sparse_and_dense() -> None:
    compare_with_ddp(Tables, table_step, steps=5)


def sparse_zeroed_in_place() -> None:
    compare_with_ddp(Tables, partial(table_step, set_to_none=False))


def sparse_never_zeroed() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.model(ids(30)).square().mean().backward()

    compare_with_ddp(Tables, step)


def sparse_with_an_empty_batch_on_one_rank() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        count = 0 if dist.get_rank() == number % 2 else 5
        twin.model(ids(30, count)).square().sum().backward()
        twin.optimizer.step()

    compare_with_ddp(Tables, step)


def sparse_unused_in_turns_never_zeroed() -> None:
    """Keeps rows from an earlier step: they are sent again, though this rank's backward brings none."""

    def step(twin: Twin, number: int) -> None:
        words = number == 0 or dist.get_rank() == number % 2
        twin.module.use_words = words
        twin.model(ids(30)).square().mean().backward()

    compare_with_ddp(Tables, step, steps=5, **UNUSED)


def tied_dense() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(ids(12)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(partial(TiedTable, sparse=False), step, optimizer=momentum)


def sparse_under_each_scheme() -> None:
    """Compares every scheme for tables; the last two have room for all rows, or for those of some ranks only."""
    planned = [BalancedParallelism(capacity=(rows,), same_rows=(0,)) for rows in (30, 18)]
    for scheme in (AGSparse(), BalancedParallelism(), *planned):
        specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(Tables()).items()}
        dense = [name for name in specs if name.startswith("out")]
        buckets = [(["words.weight"], scheme), (dense, AllReduce()), (["bags.weight"], scheme)]
        plan = Plan.make(specs, dist.get_world_size(), buckets)
        compare_with_ddp(Tables, table_step, options={"plan": plan})


def bag_of_words(words: Scheme[Any], dense: Scheme[Any]) -> tuple[dict[str, TensorSpec], list[Twin]]:
    """Twins after some steps in which one scheme has a gradient that is mostly zero, and another one all else."""

    def make() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(500, 4, mode="sum"), nn.Linear(4, 6))

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(torch.randint(500, (3, 4))).square().mean().backward()
        twin.optimizer.step()

    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(make()).items()}
    plan = Plan.make(specs, dist.get_world_size(), [(["0.weight"], words), (["1.weight", "1.bias"], dense)])
    twins = make_twins(make, optimizer=momentum, options={"plan": plan})
    follow(twins, step, steps=4)
    return specs, twins


def dense_but_mostly_zero() -> None:
    """One bucket's elements travel alone, the other's turn out too dense for it in a stage of the same order."""

    specs, twins = bag_of_words(BalancedElements(), BalancedElements(seed=1))
    assert twins[1].handle is not None
    table, dense = twins[1].handle.statistics()
    assert 0 < table.sent_bytes < 0.1 * table.steps * specs["0.weight"].nbytes
    assert dense.predicted_bytes == dense.sent_bytes
    detach(twins)
    for first in (BalancedElements(capacity=(60, 150)), BalancedElements(capacity=(3, 5))):  # no room for most steps
        detach(bag_of_words(first, SparseReduceScatter())[1])


def points_of_the_design_space() -> None:
    """Runs points of the design space, tables in a ring and a dense bucket in pairs: their rounds alternate."""
    ring = RowPoint(communication=Communication.RING, aggregation=Aggregation.ONE_SHOT)
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(Tables()).items()}
    dense = [name for name in specs if name.startswith("out")]
    buckets = [(["words.weight"], ring), (dense, DOUBLING_OF_ELEMENTS), (["bags.weight"], DOUBLING_OF_ROWS)]
    plan = Plan.make(specs, dist.get_world_size(), buckets)
    assert Plan.from_json(plan.to_json()) == plan
    compare_with_ddp(Tables, table_step, options={"plan": plan})


# Other ways to run a model.


def checkpointing() -> None:
    compare_with_ddp(Checkpointed, train_step)


def dropout_and_retained_graph_inside_one_backward() -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        output = twin.model(rows())
        (output.mean() + output.square().mean()).backward(retain_graph=True)
        twin.optimizer.step()

    compare_with_ddp(Checkpointed, step)


def plan_that_cuts_parameters() -> None:
    model = Perceptron()
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    whole = [(name, 0, spec.numel) for name, spec in specs.items() if name != "layers.2.weight"]
    parts = [("layers.2.weight", 0, 13), ("layers.2.weight", 13, 40), ("layers.2.weight", 40, 64)]
    buckets = [([*whole[:2], parts[2]], AllReduce()), ([parts[0]], AllReduce()), ([parts[1], *whole[2:]], AllReduce())]
    plan = Plan.make(specs, dist.get_world_size(), buckets)
    compare_with_ddp(Perceptron, train_step, options={"plan": plan}, optimizer=momentum)
    compare_with_ddp(Perceptron, partial(accumulate, zero=False), options={"plan": plan}, optimizer=momentum)
    compare_with_ddp(Perceptron, partial(train_step, set_to_none=False), options={"plan": plan}, optimizer=momentum)


def plan_that_cuts_an_unused_parameter() -> None:
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(Branches()).items()}
    cut = "branches.1.weight"
    first = [(name, 0, spec.numel) for name, spec in specs.items() if name != cut]
    buckets = [([*first, (cut, 0, 5)], AllReduce()), ([(cut, 5, 18)], AllReduce())]
    plan = Plan.make(specs, dist.get_world_size(), buckets)

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad(set_to_none=number % 2 == 0)
        twin.model(rows(), (0,) if dist.get_rank() == 0 or number == 3 else (1,)).sum().backward()
        twin.optimizer.step()

    compare_with_ddp(Branches, step, options={"plan": plan}, **UNUSED)


def several_models_in_one_step() -> None:
    """Trains as a GAN: each loss runs through both models, each model has its own optimiser."""

    def make_generator() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    generators, critics = make_twins(make_generator, optimizer=momentum), make_twins(Perceptron, optimizer=momentum)
    for number in range(4):
        for generator, critic in zip(generators, critics, strict=True):
            torch.manual_seed(100 * number + dist.get_rank())
            critic.optimizer.zero_grad()
            (critic.model(rows()).mean() - critic.model(generator.model(rows()).detach()).mean()).backward()
            critic.optimizer.step()
            generator.optimizer.zero_grad()
            critic.model(generator.model(rows())).mean().backward()
            generator.optimizer.step()
        for pair in (generators, critics):
            assert_same_gradients(pair[0].gradients(), pair[1].gradients(), f"after step {number}")
    for pair in (generators, critics):
        assert_same_weights(*pair)
        detach(pair)


def scaler_skips_a_step() -> None:
    """Overflows on one rank: all ranks skip the step and lower the scale."""
    twins = make_twins(Perceptron, optimizer=momentum)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in twins]
    for number in range(5):
        before = [twin.module.layers[0].weight.clone() for twin in twins]
        for twin, scaler in zip(twins, scalers, strict=True):
            torch.manual_seed(number * 10 + dist.get_rank())
            twin.optimizer.zero_grad()
            loss = twin.model(rows()).square().mean()
            if number == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(twin.optimizer)
            scaler.update()
        assert_same_gradients(twins[0].gradients(), twins[1].gradients(), f"after step {number}")
        skipped = [torch.equal(b, t.module.layers[0].weight) for b, t in zip(before, twins, strict=True)]
        assert skipped == [number == 2] * 2
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same_weights(*twins)
    detach(twins)


CASES = [
    zero_grad_to_none,
    zero_grad_to_zero,
    gradients_never_zeroed,
    bfloat16,
    float16,
    float64,
    several_dtypes,
    adam,
    gradients_clipped,
    channels_last_and_batch_norm,
    a_model_that_calls_itself,
    evaluation_in_between,
    losses_of_several_scales,
    micro_batches,
    micro_batches_never_zeroed,
    micro_batches_that_use_other_branches,
    micro_batches_that_use_other_branches_everywhere,
    sparse_micro_batches,
    unused_everywhere,
    unused_on_some_ranks,
    unused_after_it_was_used,
    unused_in_turns_never_zeroed,
    frozen_after_attach_and_unfrozen,
    frozen_before_attach,
    frozen_with_gradients_of_local_micro_batches,
    sparse_and_dense,
    sparse_zeroed_in_place,
    sparse_never_zeroed,
    sparse_with_an_empty_batch_on_one_rank,
    sparse_unused_in_turns_never_zeroed,
    tied_dense,
    sparse_under_each_scheme,
    dense_but_mostly_zero,
    points_of_the_design_space,
    checkpointing,
    dropout_and_retained_graph_inside_one_backward,
    plan_that_cuts_parameters,
    plan_that_cuts_an_unused_parameter,
    several_models_in_one_step,
    scaler_skips_a_step,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_ddps_to_the_bit_on_two_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case)


WIDER = [unused_on_some_ranks, unused_in_turns_never_zeroed, micro_batches_never_zeroed, sparse_and_dense, adam]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("case", WIDER, ids=lambda case: case.__name__)
def test_gradients_are_ddps_up_to_rounding_on_more_ranks(world: World, case: Callable[[], None], size: int) -> None:
    world(size).run(case)
