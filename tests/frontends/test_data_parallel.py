"""gradsync's DistributedDataParallel has torch's constructor, values and copies, and passes frameworks' checks."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import gradsync
from tests.frontends.models import Branches, Convolutions, Perceptron, Tables
from tests.frontends.twins import Twin, assert_same_on_all_ranks, follow, plain
from tests.world import Ranks, new_oracle_group

World = Callable[[int], Ranks]
TIMEOUT_S = 15


def wrapped(module: nn.Module, **options: Any) -> gradsync.DistributedDataParallel:
    return gradsync.DistributedDataParallel(module, timeout=TIMEOUT_S, **options)


def twins(make: Callable[[], nn.Module], **options: Any) -> tuple[Twin, Twin]:
    """Returns (torch's class, gradsync's) around copies of one model, with other weights on each rank."""
    made = []
    for wrap in (lambda module: DistributedDataParallel(module, process_group=new_oracle_group(), **options), wrapped):
        torch.manual_seed(dist.get_rank())
        module = make()
        model = wrap(module) if wrap is not wrapped else wrapped(module, **options)
        made.append(Twin(module, model, plain(list(module.parameters())), model.no_sync))
    return made[0], made[1]


def dense_step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    twin.model(torch.randn(4, 6)).square().mean().backward()
    twin.optimizer.step()


def branch_step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    twin.model(torch.randn(4, 6), ((number + dist.get_rank()) % 2,)).square().mean().backward()
    twin.optimizer.step()


def sparse_step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    twin.model(torch.randint(30, (4, 5))).square().mean().backward()
    twin.optimizer.step()


def image_step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    twin.model(torch.randn(4, 2, 8, 8)).square().mean().backward()
    twin.optimizer.step()


def no_sync_step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    for micro in range(3):
        with nullcontext() if micro == 2 else twin.no_sync():
            twin.model(torch.randn(4, 6)).square().mean().backward()
    twin.optimizer.step()


def flag_step(twin: Twin, number: int) -> None:
    """Sets the attribute `require_backward_grad_sync` by hand, as nanoGPT does."""
    twin.optimizer.zero_grad()
    for micro in range(3):
        twin.model.require_backward_grad_sync = micro == 2
        twin.model(torch.randn(4, 6)).square().mean().backward()
    twin.optimizer.step()


def compare(make: Callable[[], nn.Module], step: Callable[[Twin, int], None], options: dict[str, Any]) -> None:
    follow(twins(make, **options), step, steps=4)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("make", "step", "options"),
    [
        (Perceptron, dense_step, {}),
        (Perceptron, dense_step, {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
        (Branches, branch_step, {"find_unused_parameters": True}),
        (Tables, sparse_step, {}),
        (Convolutions, image_step, {}),
        (Convolutions, image_step, {"forward_sync_buffers": False}),
        (Perceptron, no_sync_step, {}),
        (Perceptron, flag_step, {}),
    ],
)
def test_a_training_loop_gives_ddps_values(
    world: World, make: Callable[[], nn.Module], step: Callable[[Twin, int], None], options: dict[str, Any], size: int
) -> None:
    if options.get("forward_sync_buffers") is False and size == 3:
        pytest.skip("buffers are each rank's own: one size is enough")
    if not options.keys() <= inspect.signature(DistributedDataParallel).parameters.keys():
        pytest.skip(f"this torch has none of {', '.join(options)}")
    world(size).run(compare, make, step, options)


def test_its_constructor_takes_what_torchs_takes() -> None:
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    ours = inspect.signature(gradsync.DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        default = None if name == "broadcast_buffers" else parameter.default  # True in torch 2.11, for the same
        assert (ours[name].kind, ours[name].default) == (parameter.kind, default), name
    later = {"batched_grad_copy", "forward_sync_buffers"}  # than torch 2.11
    of_gradsync = ours.keys() - theirs.keys() - later
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in of_gradsync)


def warnings_about_buffers() -> None:
    group, wrappers = new_oracle_group(), (DistributedDataParallel, gradsync.DistributedDataParallel)
    found: list[list[type[Warning]]] = []
    for wrapper in wrappers:
        with warnings.catch_warnings(record=True, action="always") as caught:
            wrapper(Perceptron(), process_group=group, broadcast_buffers=False)
        found.append([warning.category for warning in caught])
    assert found[0] == found[1]


def test_it_calls_an_argument_deprecated_where_torchs_does(world: World) -> None:
    world(2).run(warnings_about_buffers)


def identity() -> None:
    module = Perceptron()
    model = wrapped(module)
    assert isinstance(model, DistributedDataParallel)
    assert not hasattr(model, "reducer")
    assert model.module is module
    assert list(model.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    assert sorted(get_model_state_dict(model)) == sorted(module.state_dict())
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="its argument plan= says how gradients are exchanged"):
        model.register_comm_hook(None, gradsync.ddp_hook)
    with pytest.raises(ValueError, match="torch.autocast"):
        wrapped(Perceptron(), mixed_precision=object())
    with pytest.raises(ValueError, match="a module on the CPU: leave them out"):
        wrapped(Perceptron(), device_ids=[0])
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        wrapped(Perceptron().requires_grad_(False))


def test_others_take_it_for_torchs(world: World) -> None:
    world(2).run(identity)


def as_frameworks_use_it() -> None:
    """Compares with torch's class the attributes that frameworks read, and asks for logging data."""
    theirs = DistributedDataParallel(Perceptron(), process_group=new_oracle_group())
    ours = wrapped(Perceptron())
    for name in ("require_forward_param_sync", "require_backward_grad_sync", "static_graph", "find_unused_parameters"):
        assert getattr(ours, name) == getattr(theirs, name), name
        assert getattr(copy.deepcopy(ours), name) == getattr(theirs, name), name
    assert not ours._get_ddp_logging_data().get("can_set_static_graph")
    with pytest.raises(AttributeError, match=r"has no Reducer; .* call gradsync\.attach\(ddp_model\)"):
        _ = ours.reducer


def test_frameworks_find_what_they_use_of_torchs(world: World) -> None:
    world(2).run(as_frameworks_use_it)


def step_of(model: nn.Module, number: int) -> dict[str, Tensor]:
    torch.manual_seed(10 * number + dist.get_rank())
    model.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def copies(how: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = wrapped(Perceptron(), find_unused_parameters=True)
    before = step_of(model, 0)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert type(copied) is gradsync.DistributedDataParallel
    with torch.no_grad():
        assert torch.equal(copied(torch.ones(2, 6)), model(torch.ones(2, 6)))
    with pytest.raises(RuntimeError, match="attaches in its first forward"):
        _ = copied.attachment
    assert_same_on_all_ranks(step_of(copied, 0))
    for name, gradient in step_of(copied, 0).items():
        torch.testing.assert_close(gradient, before[name])
    assert all(bucket.steps > 0 for bucket in copied.attachment.statistics())
    assert_same_on_all_ranks(step_of(model, 1))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_train_on(world: World, how: str) -> None:
    world(2).run(copies, how)


def copy_on_rank_0() -> None:
    """Copies the model on rank 0 only, as for an average of weights: nothing is exchanged."""
    model = wrapped(Perceptron())
    step_of(model, 0)
    if dist.get_rank() == 0:
        average = copy.deepcopy(model)
        with torch.no_grad():
            average.eval()(torch.ones(2, 6))
    assert_same_on_all_ranks(step_of(model, 1))


def test_one_rank_may_copy_alone(world: World) -> None:
    world(2).run(copy_on_rank_0)


def frozen_teacher() -> None:
    """Calls a frozen copy on one rank only, with gradients enabled: nothing is exchanged."""
    model = wrapped(Perceptron())
    teacher = copy.deepcopy(model).requires_grad_(False)
    step_of(model, 0)
    if dist.get_rank() == 0:
        assert torch.equal(teacher(torch.ones(2, 6)), model.module(torch.ones(2, 6)))
    assert_same_on_all_ranks(step_of(model, 1))


def test_a_frozen_copy_has_nothing_to_synchronise(world: World) -> None:
    world(2).run(frozen_teacher)


def pickle_of_another_group() -> None:
    model = wrapped(Perceptron(), process_group=dist.new_group())
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default process group"):
        pickle.dumps(model)


def test_a_model_of_another_group_is_not_pickled(world: World) -> None:
    world(2).run(pickle_of_another_group)


def ignored() -> None:
    torch.manual_seed(dist.get_rank())
    module = Perceptron()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.2.weight"])
    model = wrapped(module, exclude=["layers.4.*"])
    gradients = step_of(model, 0)
    own = [gradients.pop(name) for name in ("module.layers.2.weight", "module.layers.4.weight", "module.layers.4.bias")]
    assert_same_on_all_ranks(gradients)
    for tensor in (*own, module.layers[2].weight):
        every = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(every, tensor.detach())
        assert not torch.equal(*every)


def test_parameters_to_ignore_are_left_alone(world: World) -> None:
    world(2).run(ignored)


def buffers_at_the_start(options: dict[str, Any], are_leveled: bool) -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.running_mean"])
    for norm in module[1:]:
        norm.running_mean.fill_(dist.get_rank())
    wrapped(module, **options)
    leveled, ignored = module[1].running_mean, module[2].running_mean
    assert float(leveled[0]) == (0 if are_leveled else dist.get_rank())
    assert float(ignored[0]) == dist.get_rank()


@pytest.mark.parametrize(
    ("options", "are_leveled"), [({}, True), ({"forward_sync_buffers": False}, True), ({"init_sync": False}, False)]
)
def test_buffers_begin_alike_unless_they_are_ignored(world: World, options: dict[str, Any], are_leveled: bool) -> None:
    world(2).run(buffers_at_the_start, options, are_leveled)


def buffers_at_the_start_of_averages() -> None:
    """Checks buffers at the start of a plan that averages parameters."""
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[1].running_mean.fill_(dist.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plan = gradsync.planner.AveragingPlanner()
    model = wrapped(module, plan=plan, optimizer=optimizer, forward_sync_buffers=False)
    assert float(module[1].running_mean[0]) == 0
    model(torch.randn(4, 3)).mean().backward()
    optimizer.step()
    model.attachment.detach()


def test_buffers_begin_alike_under_a_plan_of_parameters(world: World) -> None:
    world(2).run(buffers_at_the_start_of_averages)


def unsynchronised_start() -> None:
    torch.manual_seed(dist.get_rank())
    module = Perceptron()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    wrapped(module, init_sync=False)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_init_sync_false_leaves_the_model(world: World) -> None:
    world(2).run(unsynchronised_start)


def unused() -> str:
    """Leaves out a branch on rank 1 only; returns the error."""
    model = wrapped(Branches())
    taken = (0, 1, 2) if dist.get_rank() == 0 else (0, 1)
    try:
        for _ in range(2):
            model(torch.randn(4, 6), taken).mean().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_unused_parameters_raise_on_all_ranks_as_the_constructor_says(world: World) -> None:
    for text in world(2).run(unused):
        assert "passing the keyword argument `find_unused_parameters=True`" in text
        assert "did not receive grad for rank 1: branches.2.weight (index 4), branches.2.bias (index 5)" in text


class NoGradient(torch.autograd.Function):
    """Gives its second input an undefined gradient, as straight-through estimators do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.step = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(self.inner(x), self.step)


def undefined() -> None:
    """Checks that a parameter that backward reaches with an undefined gradient counts as used."""
    for plain_model in (DistributedDataParallel(StraightThrough()), wrapped(StraightThrough())):
        for number in range(4):
            with plain_model.no_sync() if number == 1 else nullcontext():
                step_of(plain_model, number)


def test_undefined_gradients_are_no_unused_parameters(world: World) -> None:
    world(2).run(undefined)


def refusals() -> str:
    model = wrapped(Perceptron())
    with pytest.raises((ValueError, RuntimeError), match="synchronises its model itself"):
        gradsync.attach(model, timeout=TIMEOUT_S)
    other = Perceptron()
    try:  # rank 1 attaches another kind of model meanwhile, and learns of it
        gradsync.attach(model if dist.get_rank() == 0 else other, timeout=TIMEOUT_S)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing raised"


def test_attach_to_it_is_refused_on_all_ranks(world: World) -> None:
    for text in world(2).run(refusals):
        assert "after model.attachment.detach(), attach to model.module" in text


def wrap_again() -> None:
    module = Perceptron()
    first = wrapped(module)
    step_of(first, 0)
    second = wrapped(module)
    assert_same_on_all_ranks(step_of(second, 1))
    with pytest.raises(RuntimeError, match="wrapped in another DistributedDataParallel since"):
        first(torch.randn(4, 6))
    nested = wrapped(second)
    assert_same_on_all_ranks(step_of(nested, 2))
    del first, second, nested
    gc.collect()
    gradsync.attach(module, timeout=TIMEOUT_S).detach()


def test_the_newest_wrapper_synchronises_until_it_is_dropped(world: World) -> None:
    world(2).run(wrap_again)


def a_wrapper_that_was_left() -> None:
    """Loses a wrapper's model in three ways: its next forward raises, or is synchronised."""
    dropped = wrapped(Perceptron())
    wrapped(dropped.module)  # and dropped at once
    gc.collect()
    failed = wrapped(Perceptron())
    with pytest.raises(TypeError):
        wrapped(failed.module, plan=7)
    for left in (dropped, failed):
        with pytest.raises(RuntimeError, match="wrapped in another DistributedDataParallel since"):
            left(torch.randn(4, 6))
    assert_same_on_all_ranks(step_of(wrapped(failed.module), 0))
    copied = wrapped(Perceptron())
    shallow = copy.copy(copied)
    with pytest.raises(RuntimeError, match="already"):
        shallow(torch.randn(4, 6))
    del shallow
    gc.collect()
    assert_same_on_all_ranks(step_of(copied, 1))


def test_a_wrapper_never_trains_on_without_synchronising(world: World) -> None:
    world(2).run(a_wrapper_that_was_left)


def a_nested_copy() -> None:
    nested = copy.deepcopy(wrapped(wrapped(Perceptron())))
    assert_same_on_all_ranks(step_of(nested, 0))


def test_a_copy_of_nested_wrappers_synchronises(world: World) -> None:
    world(2).run(a_nested_copy)
