"""Loops that DDP refuses, hangs on or leaves unsynchronised; the mean of the ranks' own gradients is the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync.planner import default_plan
from gradsync.tensors.density import ParameterProfile
from tests.frontends.models import Branches, Convolutions, HiddenTable, Perceptron, TiedTable
from tests.frontends.twins import assert_same_on_all_ranks, averaged, plain
from tests.world import Ranks

World = Callable[[int], Ranks]

Backward = Callable[[nn.Module, int], None]


def compare_with_mean(
    make: Callable[[], nn.Module],
    backward: Backward,
    *,
    steps: int = 4,
    adapt: Callable[..., nn.Module] | None = None,
    closures: bool = False,
) -> None:
    """Runs `backward(model, number)` on an attached model and on a local copy whose gradients are averaged by hand.

    `closures`: lets the optimiser of the attached model call it.
    """
    torch.manual_seed(0)
    local = make()
    torch.manual_seed(0)
    module = make()
    handle = gradsync.attach(module, timeout=15)
    model = adapt(module) if adapt else module
    optimizers = [plain(list(m.parameters())) for m in (local, module)]
    for number in range(steps):
        for each, optimizer in zip((local, model), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(100 * number + dist.get_rank())
            if closures and each is model:
                optimizer.step(partial(backward, each, number))  # type: ignore[arg-type]  # it may return nothing
                continue
            backward(each, number)
            if each is local:
                average_by_hand(local)
            optimizer.step()  # ours brings in a rank whose loss did not need the model at all
        for (name, got), expected in zip(module.named_parameters(), local.parameters(), strict=True):
            assert (got.grad is None) == (expected.grad is None), f"{name}: {got.grad}, expected {expected.grad}"
            if got.grad is not None:
                torch.testing.assert_close(got.grad.to_dense(), expected.grad, rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(dict(module.named_parameters()))
    handle.detach()


def average_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        brought = torch.tensor([float(parameter.grad is not None)])
        dist.all_reduce(brought)
        if brought > 0:
            mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = averaged(mine)


def rows() -> Tensor:
    return torch.randn(4, 6)


def loss_reaches_no_parameter_on_one_rank() -> None:
    """The output there requires gradients through the input only; DDP hangs."""

    def backward(model: nn.Module, number: int) -> None:
        taken = (0,) if dist.get_rank() == number % 2 else ()
        model(rows().requires_grad_(), taken).square().mean().backward()

    compare_with_mean(Branches, backward)


def loss_ignores_the_output_on_one_rank(*, closures: bool = False) -> None:
    """Backward does not touch the model there: `optimizer.step()` brings the rank in; DDP hangs."""

    def backward(model: nn.Module, number: int) -> None:
        output = model(rows())
        unrelated = torch.ones(2, requires_grad=True)
        (output.mean() if dist.get_rank() != number % 2 else unrelated.sum()).backward()

    compare_with_mean(Perceptron, backward, closures=closures)


def loss_in_a_closure_ignores_the_output_on_one_rank() -> None:
    """The end of the closure brings the rank in, before the update; Lightning steps so."""
    loss_ignores_the_output_on_one_rank(closures=True)


def loss_ignores_the_output_on_all_ranks(*, closures: bool = False) -> None:
    def backward(model: nn.Module, number: int) -> None:
        model(rows())
        torch.ones(2, requires_grad=True).sum().backward()

    compare_with_mean(Perceptron, backward, closures=closures)


def loss_in_a_closure_ignores_the_output_on_all_ranks() -> None:
    loss_ignores_the_output_on_all_ranks(closures=True)


def tied_sparse_table() -> None:
    """Embedding and output layer share a matrix; the gradient is dense, which DDP refuses of a sparse table."""
    compare_with_mean(
        partial(TiedTable, sparse=True), lambda model, _: model(torch.randint(12, (4, 3))).square().mean().backward()
    )


def table_that_no_module_announces() -> None:
    """The first backward shows that the gradient is sparse; DDP must know it before."""
    compare_with_mean(HiddenTable, lambda model, _: model(torch.randint(25, (4, 3))).square().mean().backward())


def sparse_on_one_rank_dense_on_the_other() -> None:
    def backward(model: nn.Module, number: int) -> None:
        output = model(torch.randint(25, (4, 3))).square().mean()
        if dist.get_rank() == number % 2:
            output = output + model.table.square().mean()
        output.backward()

    compare_with_mean(HiddenTable, backward)


def two_backwards_of_one_graph() -> None:
    """DDP leaves the second backward of a forward unsynchronised without a word; here every backward is."""

    def backward(model: nn.Module, number: int) -> None:
        output = model(rows())
        output.mean().backward(retain_graph=True)
        output.square().mean().backward()

    compare_with_mean(Perceptron, backward)


def two_forwards_then_two_backwards() -> None:
    def backward(model: nn.Module, number: int) -> None:
        first, second = model(rows()), model(rows())
        first.mean().backward()
        second.square().mean().backward()

    compare_with_mean(Perceptron, backward)


def gradients_of_gradients() -> None:
    """`create_graph=True`: the gradients' values are averaged, their graph is not; DDP fails."""

    def backward(model: nn.Module, number: int) -> None:
        with warnings.catch_warnings(action="ignore"):  # torch's advice on reference cycles
            model(rows()).square().mean().backward(create_graph=number % 2 == 0)
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.detach()

    compare_with_mean(Perceptron, backward)


def penalty_on_the_gradient() -> None:
    """`autograd.grad` inside a loss, as gradient penalties do."""

    def backward(model: nn.Module, number: int) -> None:
        x = rows().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.square().mean() + model(x).mean()).backward()

    compare_with_mean(Perceptron, backward)


def whole_model_checkpointed() -> None:
    """The model's forward runs again inside backward: no forward of a step, no broadcast of buffers."""

    def backward(model: nn.Module, number: int) -> None:
        checkpoint(model, torch.randn(2, 2, 6, 6), use_reentrant=False).square().mean().backward()

    compare_with_mean(Convolutions, backward)


def part_of_the_model_called_alone() -> None:
    """Calls a submodule alone: no forward of the model itself marks the beginning of the step."""
    compare_with_mean(Perceptron, lambda model, _: model.layers(rows()).square().mean().backward())


def compiled_after_attach() -> None:
    torch._dynamo.reset()
    compare_with_mean(
        Perceptron,
        lambda model, _: model(rows()).square().mean().backward(),
        adapt=partial(torch.compile, backend="aot_eager"),
    )


def compiled_before_attach() -> None:
    torch._dynamo.reset()

    def make() -> nn.Module:
        return torch.compile(Perceptron(), backend="aot_eager")

    compare_with_mean(make, lambda model, _: model(rows()).square().mean().backward())


CASES = [
    loss_reaches_no_parameter_on_one_rank,
    loss_ignores_the_output_on_one_rank,
    loss_in_a_closure_ignores_the_output_on_one_rank,
    loss_ignores_the_output_on_all_ranks,
    loss_in_a_closure_ignores_the_output_on_all_ranks,
    tied_sparse_table,
    table_that_no_module_announces,
    sparse_on_one_rank_dense_on_the_other,
    two_backwards_of_one_graph,
    two_forwards_then_two_backwards,
    gradients_of_gradients,
    penalty_on_the_gradient,
    whole_model_checkpointed,
    part_of_the_model_called_alone,
    compiled_after_attach,
    compiled_before_attach,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_the_mean_over_the_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case)


@pytest.mark.parametrize("case", [loss_ignores_the_output_on_one_rank, table_that_no_module_announces])
def test_gradients_are_the_mean_over_four_ranks(world: World, case: Callable[[], None]) -> None:
    world(4).run(case)


class Deaf(torch.optim.SGD):
    """Does not call its closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * parameter.grad)


def closure_that_is_not_called() -> list[str]:
    """Returns the errors of steps whose closures are not called, where rank 1 has no backward in the second one."""
    model, said = Perceptron(), []
    optimizer = Deaf(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, timeout=15)
    for number in range(3):
        try:
            output = model(rows()).mean()
            if number != 1 or dist.get_rank() == 0:
                output.backward()
            optimizer.step(lambda: 0.0)
        except RuntimeError as error:
            said.append(f"{number}: {error}")
    handle.detach()
    return said


def test_a_closure_that_is_not_called_cannot_bring_a_rank_in(world: World) -> None:
    first, second = world(2).run(closure_that_is_not_called)
    assert "did not call its closure" in first[0] and first[0].startswith("1: ")
    assert second[0].startswith("1: Deaf.step(closure) did not call its closure, and on this rank backward reached no")


def plans_of_a_planner_that_asks_its_rank() -> str:
    rank = dist.get_rank()

    def fickle(profiles: Sequence[ParameterProfile], world_size: int) -> gradsync.Plan:
        plan = default_plan(profiles, world_size)
        measured = any(profile.position for profile in profiles)
        segments = [(bucket.names[::-1], bucket.scheme) for bucket in plan.buckets]
        specs = {profile.name: profile.tensor for profile in profiles}
        return gradsync.Plan.make(specs, world_size, segments) if measured and rank else plan

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    handle = gradsync.attach(model, plan=fickle, timeout=15)
    try:
        model(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        handle.detach()
    return "no error"


def test_plans_that_differ_after_the_first_step_raise_on_every_rank(world: World) -> None:
    for message in world(2).run(plans_of_a_planner_that_asks_its_rank):
        assert "the plans made after this step differ: rank 1 has made others than rank 0" in message


def layouts_and_plan_of_a_hidden_table() -> tuple[list[str], list[str]]:
    model = HiddenTable()
    handle = gradsync.attach(model, timeout=15)
    layouts = []
    for _ in range(3):
        model.zero_grad()
        model(torch.randint(25, (4, 3))).square().mean().backward()
        layouts.append(str(model.table.grad.layout))
    words = handle.explain()
    handle.detach()
    return layouts, words


def test_the_first_steps_show_that_a_table_is_sparse_and_how(world: World) -> None:
    for layouts, words in world(2).run(layouts_and_plan_of_a_hidden_table):
        assert layouts == ["torch.sparse_coo"] * 3
        assert any(word.startswith("table (") and "dense) ->" in word for word in words)
