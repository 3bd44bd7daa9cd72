"""Sparsity found in unannounced dense gradients: the exchange uses it, and gradients are DDP's bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.planner import default_plan, default_plans
from gradsync.tensors.density import ParameterProfile
from tests.frontends.twins import Twin, detach, follow, make_twins
from tests.world import Ranks

World = Callable[[int], Ranks]

ROWS, DIM = 3000, 32


class Words(nn.Module):
    """An embedding with dense gradients and a linear layer large enough to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM)
        self.wide = nn.Linear(DIM, 2100)

    def forward(self, ids: Tensor) -> Tensor:
        return self.wide(self.words(ids).mean(1))


class DeadUnits(nn.Module):
    """Most hidden units are dead: rows of the first matrix, and columns of the second, have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(300, 400)
        self.out = nn.Linear(400, 300)
        with torch.no_grad():
            self.into.bias.copy_((torch.arange(400) % 20 == 0) * 105.0 - 100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).relu())


class Adapter(nn.Module):
    """A low-rank adapter: the second matrix starts at zero, so the first one's first gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2100, DIM, bias=False)
        self.up = nn.Linear(DIM, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


def schemes(twin: Twin) -> dict[str, str]:
    """Returns each parameter's scheme in the plan of the moment."""
    assert twin.handle is not None
    return {name: b.scheme.name for b in twin.handle.plan.buckets for name in b.names}


def words_step(twin: Twin, number: int, *, ids: Callable[[int], Tensor], set_to_none: bool = True) -> None:
    twin.optimizer.zero_grad(set_to_none=set_to_none)
    if number % 3 == 1:
        with twin.no_sync():
            twin.model(ids(number)).square().mean().backward()
    twin.model(ids(number)).square().mean().backward()
    twin.optimizer.step()


def few_ids(number: int) -> Tensor:
    return torch.randint(ROWS, (8, 5))


def more_and_more_ids(number: int) -> Tensor:
    return torch.randint(ROWS, (8, 5 if number < 4 else 2000))


def no_ids_here(number: int) -> Tensor:
    """Returns ids for a step; in some steps this rank looks up fewer."""
    return torch.randint(ROWS, (8, 5 if (number + dist.get_rank()) % 3 else 1))


def embedding_is_found(ids: Callable[[int], Tensor], set_to_none: bool) -> tuple[dict[str, str], list[str], bool]:
    twins = make_twins(Words, options={"plan": default_plan})  # one plan: no trial
    follow(twins, partial(words_step, ids=ids, set_to_none=set_to_none), steps=8)
    ours = twins[1]
    gradient = ours.gradients()["words.weight"]
    assert gradient is not None and ours.handle is not None
    result = schemes(ours), ours.handle.explain(), gradient.untyped_storage().nbytes() == gradient.nbytes
    detach(twins)
    return result


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("ids", [few_ids, more_and_more_ids, no_ids_here])
def test_an_embedding_with_dense_gradients_is_exchanged_by_rows(
    world: World, ids: Callable[[int], Tensor], set_to_none: bool
) -> None:
    for by_name, words, alone in world(2).run(embedding_is_found, ids, set_to_none):
        assert by_name == {
            "words.weight": "agsparse",  # on two ranks it moves as few bytes as balanced parallelism
            "wide.weight": "all_reduce",
            "wide.bias": "all_reduce",
        }
        assert any("words.weight (" in line and "% dense) -> agsparse" in line for line in words)
        assert alone  # the gradient keeps no bucket of an earlier plan alive


def adapter_is_dense() -> list[dict[str, str]]:
    twins = make_twins(Adapter)
    seen = []

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(torch.randn(4, 2100)).sum().backward()
        twin.optimizer.step()
        if twin.handle is not None:
            seen.append(schemes(twin))

    follow(twins, step, steps=4)
    detach(twins)
    return seen


def test_a_gradient_that_is_zero_in_the_first_step_only_is_not_taken_for_sparse(world: World) -> None:
    for seen in world(2).run(adapter_is_dense):
        assert all(set(by_name.values()) == {"all_reduce"} for by_name in seen)


def dead_units_are_found() -> tuple[dict[str, str], dict[str, str]]:
    twins = make_twins(DeadUnits, options={"plan": default_plan})
    follow(twins, dead_step, steps=5)
    found = schemes(twins[1])
    assert twins[1].handle is not None
    (behind,) = [s for s in twins[1].handle.statistics() if s.names == ("out.weight",)]
    assert behind.density == pytest.approx(0.05, rel=0.3)
    assert behind.predicted_bytes == pytest.approx(behind.sent_bytes, rel=0.2)
    with torch.no_grad():
        for twin in twins:
            twin.module.get_parameter("into.bias").fill_(1.0)
    follow(twins, dead_step, steps=3)  # all units live: the sparse exchange becomes an all-reduce
    after = schemes(twins[1])
    detach(twins)
    return found, after


def dead_step(twin: Twin, number: int) -> None:
    twin.optimizer.zero_grad()
    twin.model(torch.randn(4, 300)).square().mean().backward()
    twin.optimizer.step()


def test_dead_units_are_found_by_rows_before_them_and_by_elements_behind_them(world: World) -> None:
    for found, after in world(2).run(dead_units_are_found):
        assert found == after
        assert (found["into.weight"], found["out.weight"]) == ("agsparse", "balanced_elements")
        assert found["into.bias"] == found["out.bias"] == "all_reduce"


def trial_keeps_dense_as_a_choice() -> tuple[bool, int]:
    torch.manual_seed(0)
    model = Words()
    plans: list[list[gradsync.Plan]] = []

    def spying(profiles: Sequence[ParameterProfile], world_size: int) -> list[gradsync.Plan]:
        plans.append(default_plans(profiles, world_size))
        return plans[-1]

    handle = gradsync.attach(model, plan=spying, timeout=15)
    for _ in range(3):
        model.zero_grad()
        model(few_ids(0)).sum().backward()
    handle.detach()
    ways = [{b.scheme.name for b in plan.buckets} for plan in plans[-1]]
    return {"all_reduce"} in ways, sum({"all_reduce"} != way for way in ways)


def test_what_was_found_is_tried_beside_the_plan_that_trusts_the_layout(world: World) -> None:
    for dense_tried, found_tried in world(2).run(trial_keeps_dense_as_a_choice):
        assert dense_tried
        assert found_tried


def odd_gradients() -> tuple[bool, bool]:
    """Returns (no graph is kept, all ranks have the same bits)."""
    torch.manual_seed(0)
    model = Words()
    handle = gradsync.attach(model, plan=default_plan, timeout=15)
    if dist.get_rank() == 0:
        model.words.weight.register_hook(lambda g: torch.where(g == 0, torch.tensor(-0.0), g))
    for number in range(4):
        model.zero_grad()
        torch.manual_seed(10 * number + dist.get_rank())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of create_graph, about a cycle
            model(few_ids(number)).square().mean().backward(create_graph=number == 3)
    gradient = model.words.weight.grad
    assert gradient is not None
    first = gradient.detach().clone()
    dist.broadcast(first, src=0)
    same = torch.equal(first.view(torch.int32), gradient.detach().view(torch.int32))
    graph = gradient.requires_grad or gradient.grad_fn is not None
    handle.detach()
    return not graph, same


def test_a_found_gradient_keeps_no_graph_and_the_same_zeros_on_all_ranks(world: World) -> None:
    for no_graph, same in world(2).run(odd_gradients):
        assert no_graph
        assert same


def found_behind_ddp() -> dict[str, str]:
    torch.manual_seed(0)
    oracle = DistributedDataParallel(Words())
    torch.manual_seed(0)
    model = DistributedDataParallel(Words())
    handle = gradsync.attach(model, plan=default_plan, timeout=15)
    for number in range(6):
        torch.manual_seed(10 * number + dist.get_rank())
        ids = few_ids(number)
        for each in (oracle, model):
            each.zero_grad()
            each(ids).square().mean().backward()
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
    by_name = {name: b.scheme.name for b in handle.plan.buckets for name in b.names}
    handle.detach()
    return by_name


def test_behind_a_ddp_hook_it_is_found_too(world: World) -> None:
    for by_name in world(2).run(found_behind_ddp):
        assert by_name["words.weight"] == "agsparse"
