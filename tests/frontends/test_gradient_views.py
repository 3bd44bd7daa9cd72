"""Uses of `p.grad` between, around and inside backwards: values are DDP's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.plans.plan import Plan
from gradsync.schemes import AGSparse
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.twins import (
    Twin,
    assert_same_gradients,
    assert_same_on_all_ranks,
    assert_same_weights,
    averaged,
    compare_with_ddp,
    detach,
    make_twins,
)
from tests.world import Ranks

World = Callable[[int], Ranks]


def small_and_large() -> nn.Module:
    """Returns layers of which the last weight but one has 160 KB, and so uses its own memory."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 200), nn.Linear(200, 1)
    )


def with_table() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 200), nn.Linear(200, 200), nn.Linear(200, 1))


def forward(twin: Twin) -> Tensor:
    first = next(twin.module.children())
    inputs = torch.randint(0, 50, (8,)) if isinstance(first, nn.Embedding) else torch.randn(8, 4)
    return twin.model(inputs).square().mean()


def data_assigned(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    (forward(twin) * 8).backward()
    for parameter in twin.module.parameters():
        parameter.grad.data = parameter.grad.data / 8
    twin.optimizer.step()


def set_elsewhere(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad(set_to_none=number % 2 == 0)
    forward(twin).backward()
    for parameter in twin.module.parameters():
        if parameter.grad.layout is torch.strided:
            parameter.grad.set_(torch.full_like(parameter.grad, 0.5) * parameter.grad)
    twin.optimizer.step()


def moved_to_cpu(twin: Twin, number: int) -> None:
    """Calls `Module.cpu()`, which assigns to `.data` of parameters and gradients."""
    forward(twin).backward()
    twin.module.cpu()
    twin.optimizer.step()
    twin.optimizer.zero_grad(set_to_none=number > 1)


def in_a_flat_buffer(twin: Twin, number: int) -> None:
    """Makes gradients views of the user's own flat tensor, by which the loop steps."""
    parameters = list(twin.module.parameters())
    if not hasattr(twin, "flat"):
        twin.flat = torch.zeros(sum(p.numel() for p in parameters))
        parts = twin.flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    twin.flat.zero_()
    forward(twin).backward()
    for parameter, part in zip(parameters, twin.flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data -= 0.05 * part.view_as(parameter)


def replaced_by_the_user(twin: Twin, number: int) -> None:
    """Sets gradients before backward, which accumulates into these tensors."""
    kept = []
    for parameter in twin.module.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
        kept.append(parameter.grad)
    forward(twin).backward()
    for parameter, mine in zip(twin.module.parameters(), kept, strict=True):
        assert torch.equal(mine, parameter.grad)
    twin.optimizer.step()


ANYWHERE = [data_assigned, set_elsewhere]
DENSE = [moved_to_cpu, in_a_flat_buffer, replaced_by_the_user]  # a sparse gradient is not added to a dense one in place


@pytest.mark.parametrize(
    ("make", "step"),
    [*((small_and_large, step) for step in ANYWHERE + DENSE), *((with_table, step) for step in ANYWHERE)],
)
def test_gradients_are_known_by_their_memory(
    world: World, make: Callable[[], nn.Module], step: Callable[[Twin, int], None]
) -> None:
    world(2).run(compare_with_ddp, make, step)


def whole(gradient: Tensor) -> Tensor:
    return gradient


def flattened(gradient: Tensor) -> Tensor:
    return gradient.view(-1)


def as_array(gradient: Tensor) -> Tensor:
    return torch.from_numpy(gradient.numpy())


def keep(twin: Twin, view: Callable[[Tensor], Tensor]) -> list[Tensor]:
    twin.optimizer.zero_grad()
    forward(twin).backward()
    return [view(p.grad) for p in twin.module.parameters()]


def kept_over_zero_grad(view: Callable[[Tensor], Tensor], steps: int) -> None:
    """Keeps gradients of several losses and combines them, as in multi-task learning."""
    twins = make_twins(small_and_large)
    for number in range(steps):
        kept = []
        for twin in twins:
            torch.manual_seed(1000 * number + dist.get_rank())
            tasks = [keep(twin, view) for _ in range(3)]
            kept.append(tasks)
            for parameter, *parts in zip(twin.module.parameters(), *tasks, strict=True):
                parameter.grad = sum(parts).view_as(parameter)
            twin.optimizer.step()
        for theirs, ours in zip(*kept, strict=True):
            for a, b in zip(theirs, ours, strict=True):
                assert torch.equal(a, b)
    assert_same_weights(*twins)
    detach(twins)


@pytest.mark.parametrize("view", [whole, flattened, as_array])
def test_gradients_kept_over_zero_grad_keep_their_values(world: World, view: Callable[[Tensor], Tensor]) -> None:
    world(2).run(kept_over_zero_grad, view, 4)


def kept_for_ever() -> None:
    """Keeps references to gradients that are never set to None: all steps show in them, also when plans change."""
    twins = make_twins(small_and_large)
    references: list[list[Tensor]] = [[], []]
    for number in range(8):
        for twin, mine in zip(twins, references, strict=True):
            torch.manual_seed(1000 * number + dist.get_rank())
            twin.optimizer.zero_grad(set_to_none=False)
            forward(twin).backward()
            mine[:] = mine or [p.grad.view(-1) for p in twin.module.parameters()]
            for parameter, flat in zip(twin.module.parameters(), mine, strict=True):
                assert torch.equal(parameter.grad.view(-1), flat)
            twin.optimizer.step()
        for theirs, ours in zip(*references, strict=True):
            assert torch.equal(theirs, ours)
    detach(twins)


def test_references_to_gradients_that_stay_see_every_step(world: World) -> None:
    world(2).run(kept_for_ever)


def settled_memory(set_to_none: bool) -> list[int]:
    """Returns where a large and a small gradient lie, step by step, once the plan is settled."""
    module = small_and_large()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = gradsync.attach(module, timeout=15)
    places = []
    for number in range(12):
        optimizer.zero_grad(set_to_none=set_to_none)
        module(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if handle.settled and number > 4:
            places.append([p.grad.data_ptr() for p in module.parameters()])
    handle.detach()
    assert len(places) > 3
    return [len({place[i] for place in places}) for i in range(len(places[0]))]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_memory_that_nobody_keeps_is_used_again(world: World, set_to_none: bool) -> None:
    for counts in world(2).run(settled_memory, set_to_none):
        assert counts == [1] * len(counts)


def scale() -> float:
    return 3.0 * dist.get_rank() + 0.1


def replacing(module: nn.Module) -> None:
    def hook(parameter: nn.Parameter) -> None:
        parameter.grad = parameter.grad * scale()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def in_place(module: nn.Module) -> None:
    def hook(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(scale())

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def before_accumulation(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient * scale())


def of_another(module: nn.Module) -> None:
    """Replaces, in the hook of one parameter, the gradient of a later one, which was accumulated before."""
    parameters = list(module.parameters())

    def hook(parameter: nn.Parameter) -> None:
        if parameters[-1].grad is not None:
            parameters[-1].grad = parameters[-1].grad.clone()

    parameters[0].register_post_accumulate_grad_hook(hook)


def hooked(make: Callable[[], nn.Module], hook: Callable[[nn.Module], None], early: bool) -> None:
    """Registers tensor hooks before or after attaching: the all-reduce gets the gradients that hooks return."""

    def made() -> nn.Module:
        module = make()
        if early:
            hook(module)
        return module

    twins = make_twins(made)
    if not early:
        for twin in twins:
            hook(twin.module)
    for number in range(6):
        for twin in twins:
            torch.manual_seed(1000 * number + dist.get_rank())
            twin.optimizer.zero_grad()
            forward(twin).backward()
            twin.optimizer.step()
        assert_same_gradients(twins[0].gradients(), twins[1].gradients(), f"after step {number}")
    assert_same_weights(*twins)
    detach(twins)


def rows_in_a_flat_buffer() -> None:
    """Sends as rows a dense gradient that is a view of the user's tensor."""
    torch.manual_seed(0)
    table = nn.Embedding(3000, 32)
    plan = Plan.make({"weight": TensorSpec.of(table.weight)}, dist.get_world_size(), [(["weight"], AGSparse())])
    handle = gradsync.attach(table, plan=plan, timeout=15)
    flat = torch.zeros(table.weight.numel())
    table.weight.grad = flat.view_as(table.weight)
    for number in range(4):
        flat.zero_()
        torch.manual_seed(1000 * number + dist.get_rank())
        ids = torch.randint(0, 3000, (16,))
        table(ids).sum().backward()
        local = torch.zeros(3000, 32).index_add_(0, ids, torch.ones(16, 32))
        torch.testing.assert_close(flat.view(3000, 32), averaged(local))
        assert table.weight.grad.data_ptr() == flat.data_ptr()
    handle.detach()


def test_a_dense_gradient_that_travels_as_rows_stays_in_memory_of_the_users(world: World) -> None:
    world(2).run(rows_in_a_flat_buffer)


HOOKS = [replacing, in_place, before_accumulation]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("make", "hook"),
    [*((make, hook) for make in (small_and_large, with_table) for hook in HOOKS), (small_and_large, of_another)],
)
def test_hooks_on_parameters_run_before_the_exchange(
    world: World, make: Callable[[], nn.Module], hook: Callable[[nn.Module], None], early: bool
) -> None:
    world(2).run(hooked, make, hook, early)


def in_another_memory_format() -> None:
    """Compares with a mean made by hand: DDP gives the same wrong gradient on all ranks here."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    oracle = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    handle = gradsync.attach(module, timeout=15)
    oracle.load_state_dict(module.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, oracle)]
    for number in range(6):
        if number == 2:
            module.to(memory_format=torch.channels_last)
            oracle.to(memory_format=torch.channels_last)
        for each, optimizer in zip((module, oracle), optimizers, strict=True):
            torch.manual_seed(1000 * number + dist.get_rank())
            optimizer.zero_grad(set_to_none=bool(number % 3))
            each(torch.randn(2, 3, 8, 8)).square().mean().backward()
            if each is oracle:
                for parameter in each.parameters():
                    parameter.grad = averaged(parameter.grad)
            optimizer.step()
    for mine, theirs in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert_same_on_all_ranks(dict(module.named_parameters()))
    handle.detach()


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_memory_formats_may_change_while_gradients_are_there(world: World) -> None:
    world(2).run(in_another_memory_format)


class Partly(torch.autograd.Function):
    """A module whose weight gets no gradient, or a gradient of zeros."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor, brings: bool) -> Tensor:
        ctx.brings = brings
        return x * weight

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradient, gradient.sum(0) if ctx.brings else None, None


class Undefined(nn.Module):
    """A module whose weight has a defined gradient on the ranks that `brings` lists as True."""

    def __init__(self, brings: tuple[bool, bool]) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.brings = brings

    def forward(self, x: Tensor) -> Tensor:
        return Partly.apply(self.linear(x), self.weight, self.brings[dist.get_rank()])


def undefined(brings: tuple[bool, bool]) -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(torch.randn(8, 4)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(lambda: Undefined(brings), step, find_unused_parameters=True)


@pytest.mark.parametrize("brings", [(False, False), (True, False), (True, True)])
def test_undefined_gradients_count_as_unused(world: World, brings: tuple[bool, bool]) -> None:
    world(2).run(undefined, brings)


class AddsItself(torch.autograd.Function):
    """A layer that adds to its weight's gradient in place, where there is one, and then returns None for it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            return gradient @ weight, gradient.t() @ x
        weight.grad.add_(gradient.t() @ x)
        return gradient @ weight, None


class Fused(nn.Module):
    """`layers` of width 6 that add to their gradients themselves, and a usual one after them if `ends_usual`."""

    def __init__(self, layers: int = 1, *, ends_usual: bool = True) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(6, 6) for _ in range(layers))
        self.last = nn.Linear(6, 6) if ends_usual else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = AddsItself.apply(x, weight)
        return self.last(x)


def added_in_place(local: int, synchronised: int, set_to_none: bool, ends_usual: bool) -> None:
    """Compares with DDP: `local` backwards in `no_sync`, then `synchronised` ones, in each step."""

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad(set_to_none=set_to_none)
        with twin.no_sync():
            for _ in range(local):
                twin.model(torch.randn(8, 6)).square().mean().backward()
        for _ in range(synchronised):
            twin.model(torch.randn(8, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.module.parameters(), 0.5)
        twin.optimizer.step()

    compare_with_ddp(lambda: Fused(2, ends_usual=ends_usual), step, find_unused_parameters=True)


@pytest.mark.parametrize(
    ("local", "synchronised", "set_to_none", "ends_usual"),
    [(0, 1, True, True), (1, 2, True, True), (2, 1, False, False)],
    ids=["lent", "accumulated", "no usual layer"],
)
def test_gradients_that_a_function_adds_itself_are_averaged(
    world: World, local: int, synchronised: int, set_to_none: bool, ends_usual: bool
) -> None:
    world(2).run(added_in_place, local, synchronised, set_to_none, ends_usual)


def frozen_before_backward(number_of_frozen: int, set_to_none: bool) -> None:
    """Compares with DDP: the last layers do not require gradients in backward, though they did in forward."""

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad(set_to_none=set_to_none)
        loss = forward(twin)
        frozen = list(twin.module.parameters())[-number_of_frozen:] if number % 2 == 1 else []
        for parameter in frozen:
            parameter.requires_grad_(False)
        loss.backward()
        twin.optimizer.step()
        for parameter in frozen:
            parameter.requires_grad_(True)

    compare_with_ddp(small_and_large, step, find_unused_parameters=True)


@pytest.mark.parametrize(("number_of_frozen", "set_to_none"), [(2, True), (2, False), (8, True)])
def test_parameters_may_be_frozen_between_forward_and_backward(
    world: World, number_of_frozen: int, set_to_none: bool
) -> None:
    world(2).run(frozen_before_backward, number_of_frozen, set_to_none)
