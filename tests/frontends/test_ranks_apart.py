"""Ranks that do different things: harmless differences change nothing, others raise on every rank; none hangs."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from tests.frontends.models import Perceptron
from tests.frontends.test_lifecycle import plan_for, rows
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks

World = Callable[[int], Ranks]

MILD = 10  # seconds: of waits that must not happen


def inputs(number: int) -> Tensor:
    return torch.full((2, 3), float(number + 2 * dist.get_rank()))


def expected(number: int) -> Tensor:
    """Returns the gradient of `Linear(3, 1)`'s mean output over the inputs of two ranks."""
    return torch.full((1, 3), number + 1.0)


def gradients_of_inputs_are_nobodys_business() -> None:
    """Computes saliency by `autograd.grad` and `backward(inputs=...)`, in different steps on the ranks."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, timeout=MILD)
    for number in range(5):
        optimizer.zero_grad()
        if number == 1 + dist.get_rank():
            x = torch.ones(1, 3, requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)
            model(x).sum().backward(inputs=[x])
            torch.autograd.grad(model(x).sum(), model.weight)
        model(inputs(number)).mean().backward()
        torch.testing.assert_close(model.weight.grad, expected(number))
        optimizer.step()
    assert sum(bucket.steps for bucket in handle.statistics()) == 5
    handle.detach()


def a_rank_that_joins_at_the_step(change: Callable[[nn.Module], None]) -> str:
    """Ignores the model in rank 1's loss; between backward and step all ranks run the same `change`."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradsync.attach(model, timeout=MILD)
    for number in range(3):
        optimizer.zero_grad()
        output = model(inputs(number))
        ignores = number == 1 and dist.get_rank() == 1
        loss = torch.ones(2, requires_grad=True).sum() if ignores else output.mean()
        loss.backward()
        change(model)
        optimizer.step()
    assert_same_on_all_ranks({"weight": model.weight})
    return "well"


def raising(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-0.01, 0.01)


def join_and_clip(change: Callable[[nn.Module], None]) -> str:
    return raising(lambda: a_rank_that_joins_at_the_step(change))


def join_and_leave_alone() -> str:
    return a_rank_that_joins_at_the_step(lambda model: None)


def test_a_rank_that_joins_at_the_step_averages_like_the_others(world: World) -> None:
    assert world(2).run(join_and_leave_alone) == ["well", "well"]


@pytest.mark.parametrize("change", [clip, clip_data])
def test_clipping_that_a_late_rank_cannot_have_done_raises_on_every_rank(
    world: World, change: Callable[[nn.Module], None]
) -> None:
    texts = world(2).run(join_and_clip, change)
    assert "backward reached no parameter of the model" in texts[0] and "'weight'" in texts[0], texts
    assert "clipping" in texts[1], texts


def a_backward_on_one_rank_only() -> str:
    """Runs two backwards a step; rank 1's second ignores the model, so its next first one meets rank 0's second."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradsync.attach(model, timeout=MILD)

    def train() -> None:
        for number in range(4):
            optimizer.zero_grad()
            model(rows()).mean().backward()
            if number != 1 or dist.get_rank() == 0:
                model(rows()).mean().backward()
            optimizer.step()

    return raising(train)


def only_tables_out_of_step() -> str:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, timeout=MILD)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    model(torch.tensor([1, 2])).sum().backward()
    (bucket,) = handle.statistics()
    assert bucket.sent_bytes == bucket.predicted_bytes or bucket.predicted_bytes is None
    if dist.get_rank() == 0:
        optimizer.step()
    return raising(lambda: model(torch.tensor([1, 2])).sum().backward())


def a_local_step_on_one_rank(at: int, skip: bool) -> str:
    """Lets rank 1 leave `no_sync()` in another step, or run no backward at all, and step nevertheless."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, timeout=MILD)

    def train() -> None:
        for number in range(5):
            apart = number == at and dist.get_rank() == 1
            if not (apart and skip):
                optimizer.zero_grad()
                with handle.no_sync() if apart else nullcontext():
                    model(rows()).mean().backward()
            optimizer.step()

    return raising(train)


@pytest.mark.parametrize(("at", "skip"), [(0, False), (2, False), (1, True), (2, True)])
def test_a_step_without_a_synchronised_backward_on_one_rank_raises_on_all(world: World, at: int, skip: bool) -> None:
    for text in world(2).run(a_local_step_on_one_rank, at, skip):
        assert "the ranks are out of step" in text, text


def three_steps_more_on_one_rank() -> str:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradsync.attach(model, timeout=MILD)

    def train() -> None:
        for number in range(5):
            optimizer.zero_grad()
            model(rows()).mean().backward()
            optimizer.step()
            for _ in range(3 if number == 2 and dist.get_rank() == 1 else 0):
                optimizer.step()

    return raising(train)


def test_three_steps_more_on_one_rank_raise_on_all(world: World) -> None:
    for text in world(2).run(three_steps_more_on_one_rank):
        assert "the ranks are out of step" in text, text


def windows_that_are_not_the_same() -> str:
    """Synchronises the second of two backwards on rank 0 and the first on rank 1, whose steps use a larger sum."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, timeout=MILD)

    def train() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                with handle.no_sync() if micro == dist.get_rank() else nullcontext():
                    model(rows()).mean().backward()
            optimizer.step()

    return raising(train)


def test_windows_of_no_sync_that_differ_raise_on_all(world: World) -> None:
    for text in world(2).run(windows_that_are_not_the_same):
        assert "the ranks are out of step" in text, text


def local_sgd_by_hand(optimizers: int) -> None:
    """Steps all ranks locally, by one or several optimisers, and averages parameters by hand."""
    model = Perceptron()
    halves = [list(model.layers[:2].parameters()), [*model.layers[2:].parameters(), model.scale, model.nothing]]
    parts = halves if optimizers == 2 else [halves[0] + halves[1]]
    steppers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    handle = gradsync.attach(model, timeout=MILD)
    for number in range(12):
        model.zero_grad()
        with handle.no_sync() if number % 4 else nullcontext():
            model(rows()).mean().backward()
        for optimizer in steppers:
            optimizer.step()
        if number % 4 == 3:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
    assert_same_on_all_ranks(dict(model.named_parameters()))
    handle.detach()


@pytest.mark.parametrize("optimizers", [1, 2])
def test_local_sgd_by_hand_raises_nothing(world: World, optimizers: int) -> None:
    world(2).run(local_sgd_by_hand, optimizers)


@pytest.mark.parametrize("function", [a_backward_on_one_rank_only, only_tables_out_of_step])
def test_ranks_out_of_step_raise_instead_of_averaging_different_steps(
    world: World, function: Callable[[], str]
) -> None:
    for text in world(2).run(function):
        assert "the ranks are out of step" in text, text


def detach_between_forward_and_backward() -> None:
    model = nn.Linear(3, 1, bias=False)
    handle = gradsync.attach(model, timeout=MILD)
    loss = model(inputs(0)).mean()
    handle.detach()
    loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 2.0 * dist.get_rank()))


def a_dropped_wrapper_leaves_the_model_inside_attached() -> None:
    inside = nn.Linear(3, 1, bias=False)
    gradsync.attach(nn.Sequential(inside), timeout=MILD)
    gc.collect()
    for number in range(3):
        inside.zero_grad()
        inside(inputs(number)).mean().backward()
        torch.testing.assert_close(inside.weight.grad, expected(number))


def a_dropped_model_can_be_rebuilt_around_its_parameters() -> None:
    first = nn.Linear(3, 1, bias=False)
    gradsync.attach(first, timeout=MILD)
    weight = first.weight
    del first
    gc.collect()
    second = nn.Linear(3, 1, bias=False)
    second.weight = weight
    gradsync.attach(second, timeout=MILD).detach()


def a_sharded_optimizer_steps_on_some_ranks_only() -> None:
    """Shards an optimiser over one parameter: rank 1's inner optimiser has nothing to step."""
    with warnings.catch_warnings(action="ignore"):  # torch's, about its own torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(3, 1, bias=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    handle = gradsync.attach(model, timeout=MILD)
    for number in range(5):
        optimizer.zero_grad()
        model(inputs(number)).mean().backward()
        torch.testing.assert_close(model.weight.grad, expected(number))
        optimizer.step()
    assert_same_on_all_ranks({"weight": model.weight})
    handle.detach()


def a_forward_between_two_optimizers_owes_nothing() -> None:
    """Runs a metric on rank 0, gradients enabled, after the first of two optimisers has stepped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    handle = gradsync.attach(model, timeout=MILD)
    for number in range(4):
        model.zero_grad()
        model(inputs(number)).mean().backward()
        first.step()
        if dist.get_rank() == 0:
            model(inputs(9))
        second.step()
        assert_same_on_all_ranks(dict(model.named_parameters()))
    assert sum(bucket.steps for bucket in handle.statistics()) == 4
    handle.detach()


def a_step_before_the_first_backward_is_no_round() -> None:
    """Takes a step before the first backward, as torch does to save an optimiser's initial state."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, timeout=MILD)
    if dist.get_rank() == 0:
        optimizer.step()
    for number in range(4):
        optimizer.zero_grad()
        model(inputs(number)).mean().backward()
        torch.testing.assert_close(model.weight.grad, expected(number))
        optimizer.step()
    handle.detach()


def threads() -> int:
    """Returns how many threads of engines this process has; other tests have used the same process."""
    return sum(thread.name == "gradsync" for thread in threading.enumerate())


def wait_for_threads(expected: int) -> None:
    deadline = time.monotonic() + 10
    while threads() > expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() == expected


def a_dropped_ddp_model_takes_its_thread_along() -> None:
    before = threads()
    model = DistributedDataParallel(nn.Linear(3, 3))
    gradsync.attach(model, timeout=MILD)
    model(torch.ones(1, 3)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    wait_for_threads(before)


def engines_and_their_memory_go_with_detach() -> None:
    before = threads()
    attached = DistributedDataParallel(nn.Linear(3, 3))
    handle = gradsync.attach(attached, timeout=MILD)
    attached(torch.ones(1, 3)).sum().backward()
    memory = weakref.ref(handle._engine.bucket_runs["0"].gradients)
    handle.detach()
    steps = [bucket.steps for bucket in handle.statistics()]
    gc.collect()
    assert memory() is None
    assert steps == [1], "statistics stay"
    by_hand = DistributedDataParallel(nn.Linear(3, 3))
    by_hand.register_comm_hook(gradsync.DDPState(by_hand, timeout_s=MILD), gradsync.ddp_hook)
    by_hand(torch.ones(1, 3)).sum().backward()
    del by_hand
    gc.collect()
    wait_for_threads(before)
    model = nn.Linear(3, 3)
    handle = gradsync.attach(model, timeout=MILD)
    model(torch.ones(1, 3)).sum().backward()
    memory = weakref.ref(handle._engine.bucket_runs["0"].gradients)
    handle.detach()
    gc.collect()
    assert memory() is None, "what attach returned keeps no buckets"


def an_export_on_one_rank_is_no_forward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    handle = gradsync.attach(model, timeout=MILD)
    for step in range(2):
        model(torch.ones(3, 2)).sum().backward()
        if step == dist.get_rank() == 0:
            torch.export.export(model, (torch.ones(3, 2),))
    handle.detach()


@pytest.mark.parametrize(
    "case",
    [
        gradients_of_inputs_are_nobodys_business,
        detach_between_forward_and_backward,
        a_dropped_wrapper_leaves_the_model_inside_attached,
        a_dropped_model_can_be_rebuilt_around_its_parameters,
        a_sharded_optimizer_steps_on_some_ranks_only,
        a_forward_between_two_optimizers_owes_nothing,
        a_step_before_the_first_backward_is_no_round,
        a_dropped_ddp_model_takes_its_thread_along,
        engines_and_their_memory_go_with_detach,
        an_export_on_one_rank_is_no_forward,
    ],
    ids=lambda case: case.__name__,
)
def test_two_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case)


def different_settings() -> str:
    return raising(lambda: gradsync.attach(nn.Linear(2, 2), timeout=MILD, broadcast_buffers=dist.get_rank() == 0))


def read_only_memory_on_one_rank() -> str:
    """Maps memory read-only on rank 1, where only a write shows it."""
    model = nn.Linear(2, 2)
    with torch.inference_mode(dist.get_rank() == 1):
        model.register_buffer("b", torch.zeros(4))
    return raising(lambda: gradsync.attach(model, timeout=MILD))


def buffer_that_grew() -> str:
    model = nn.BatchNorm1d(3)
    gradsync.attach(model, timeout=MILD)
    model.register_buffer("running_mean", torch.zeros(4 + dist.get_rank()))
    return raising(lambda: model(torch.ones(2, 3)))


def replaced_parameter() -> str:
    model = nn.Linear(2, 2)
    gradsync.attach(model, timeout=MILD)
    model.load_state_dict(model.state_dict(), assign=True)
    return raising(lambda: model(torch.ones(1, 2)))


def grown(change: Callable[[nn.Sequential], None], *, behind_ddp: bool = False) -> str:
    """Returns the error of a step after the model has changed."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model = DistributedDataParallel(inner, find_unused_parameters=True) if behind_ddp else inner
    handle = gradsync.attach(model, timeout=MILD, exclude=() if behind_ddp else ["2.b*"])
    model(torch.ones(1, 2)).sum().backward()
    change(inner)
    try:
        model(torch.ones(1, 2)).sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        handle.detach()
    return "well"


def added_module() -> str:
    return grown(lambda model: model.append(nn.Linear(2, 2)))


def added_module_on_one_rank() -> str:
    return grown(lambda model: model.append(nn.Linear(2, 2)) if dist.get_rank() == 0 else None)


def added_parameter() -> str:
    return grown(lambda model: model[1].register_parameter("slope", nn.Parameter(torch.ones(2))))


def replaced_module() -> str:
    return grown(lambda model: model.__setitem__(2, nn.Linear(2, 2)))


def module_in_the_memory_of_one() -> str:
    def change(model: nn.Sequential) -> None:
        freed = id(model[2])
        delattr(model, "2")
        made = [nn.Linear(2, 2)]
        while id(made[-1]) != freed:
            assert len(made) < 1000
            made.append(nn.Linear(2, 2))
        model.add_module("2", made[-1])

    return grown(change)


def added_module_behind_ddp() -> str:
    return grown(lambda model: model.append(nn.Linear(2, 2)), behind_ddp=True)


def harmless_change(number: int) -> str:
    def change(model: nn.Sequential) -> None:
        match number:
            case 0:
                model[2] = nn.Sequential(model[2])  # a wrapper
            case 1:
                model.append(nn.Linear(2, 2).requires_grad_(False))
            case 2:
                model[2].add_module("bypass", nn.Linear(2, 2))  # excluded
            case 3:
                model[1] = nn.ReLU()
            case 4:
                del model[0]

    return grown(change)


@pytest.mark.parametrize("number", range(5))
def test_modules_may_change_where_nothing_new_is_to_be_synchronised(world: World, number: int) -> None:
    assert world(2).run(harmless_change, number) == ["well"] * 2


def fill_entry(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.ones(2))


def replace_entry(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.ones(2, 2))


def load_by_assigning(model: nn.Module) -> None:
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(copies, assign=True)


def thaw(model: nn.Sequential) -> None:
    model[2].requires_grad_(True)


def load_and_thaw(model: nn.Sequential) -> None:
    load_by_assigning(model[2])
    thaw(model)


def new_in_old_places(change: Callable[[nn.Sequential], None], way: str) -> str:
    """Returns the error of steps after parameters came by entries of tables that were there when gradsync came."""
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2))
    inner[0 if change is replace_entry else 2].requires_grad_(False)
    model = DistributedDataParallel(inner, find_unused_parameters=True) if way == "behind DDP" else inner
    handle = gradsync.attach(model, timeout=MILD)
    parts = list(inner) if way == "parts" else [model]

    def step() -> None:
        x = torch.ones(1, 2)
        for part in parts:
            x = part(x)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        x.sum().backward()
        optimizer.step()

    step()
    change(inner)
    said = raising(step)
    handle.detach()
    return said


@pytest.mark.parametrize("way", ["attached", "behind DDP", "parts"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (fill_entry, "the parameter '0.bias' came to the model after"),
        (replace_entry, "was replaced after gradsync was attached ('0.weight'"),
        (load_by_assigning, "was replaced after gradsync was attached ('0.weight'"),
        (load_and_thaw, "was replaced after gradsync was attached ('2.weight'"),
        (thaw, "the parameter '2.weight' was frozen when gradsync was attached"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_parameters_that_come_by_old_entries_are_refused(
    world: World, change: Callable[[nn.Sequential], None], way: str, text: str
) -> None:
    for said in world(2).run(new_in_old_places, change, way):
        assert text in said


def other_element_type() -> str:
    model = nn.Linear(2, 2)
    gradsync.attach(model, timeout=MILD)
    model.double()
    return raising(lambda: model(torch.ones(1, 2, dtype=torch.float64)).sum().backward())


def gradient_taken_away() -> str:
    model = nn.Linear(2, 2)

    def take(parameter: Tensor) -> None:
        parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(take)
    gradsync.attach(model, timeout=MILD)
    return raising(lambda: model(torch.ones(1, 2)).sum().backward())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (different_settings, "settings of attach differ between the ranks"),
        (read_only_memory_on_one_rank, "nference tensor"),
        (buffer_that_grew, "the buffer 'running_mean' is"),
        (replaced_parameter, "a parameter of the model was replaced after gradsync was attached"),
        (added_module, "the parameter '3.weight' came to the model after gradsync was attached"),
        (added_module_on_one_rank, "the parameter '3.weight' came to the model after gradsync was attached"),
        (added_parameter, "the parameter '1.slope' came to the model after gradsync was attached"),
        (replaced_module, "the parameter '2.weight' came to the model after gradsync was attached"),
        (module_in_the_memory_of_one, "the parameter '2.weight' came to the model after gradsync was attached"),
        (added_module_behind_ddp, "the parameter '3.weight' came to the model after gradsync was attached"),
        (other_element_type, "was torch.float32 when gradsync was attached"),
        (gradient_taken_away, "was taken away by another hook before it was exchanged"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_work_is_said_on_every_rank(world: World, function: Callable[[], str], text: str) -> None:
    for said in world(2).run(function):
        assert text in said, said


def bad_states() -> None:
    model = nn.Linear(3, 1)
    handle = gradsync.attach(model, plan=plan_for(model), timeout=MILD)
    good = handle.state_dict()
    for bad, text in (
        ({"version": 3}, "the state has no 'state'"),
        ({**good, "state": {"weight": torch.zeros(3)}}, "expected a state's key to read"),
        ({**good, "state": {"weight[0:9]/residual": torch.zeros(9)}}, "reaches to element 9, the parameter has 3"),
        ({**good, "state": {"weight[0:2]/residual": torch.zeros(3)}}, r"has values of shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            handle.load_state_dict(bad)
    handle.load_state_dict(good)
    handle.detach()
    with pytest.raises(TypeError, match="plan must be a Plan"):
        gradsync.attach(model, plan="plan.json", timeout=MILD)


def test_states_and_plans_of_another_kind_are_refused(world: World) -> None:
    world(2).run(bad_states)
