"""Behind DDP's hook, what schemes keep for a parameter stays as it is in steps in which no rank used the parameter."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.frontends import ddp as frontend
from gradsync.schemes import CompressedAllGather
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.conservation import left_to_send
from tests.world import Ranks

World = Callable[[int], Ranks]
FEW = CompressedAllGather(ErrorFeedback(TopK(0.2)))
SMALL_BUCKETS = {"bucket_cap_mb": 0.0001}
ALL = ("left", "middle", "right")
Zero = str  # what becomes of gradients before a step: "none", "zero" or "kept"


class Parts(nn.Module):
    """Three layers, of which a forward takes some, and gives each one's output apart."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.middle, self.right = nn.Linear(6, 5), nn.Linear(6, 4), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor, taken: Sequence[str]) -> list[Tensor]:
        return [getattr(self, name)(x) for name in taken]


class Books:
    """A model behind DDP's hook, beside a plain copy that tells what each rank brought."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Parts()
        self.alone = copy.deepcopy(self.model)
        self.ddp = DistributedDataParallel(self.model, **options)
        specs = {name: TensorSpec.of(p) for name, p in self.model.named_parameters()}
        plan = Plan.make(specs, dist.get_world_size(), [(list(specs), FEW)])
        self.state = gradsync.DDPState(self.ddp, plan=plan, timeout_s=20)
        self.ddp.register_comm_hook(self.state, gradsync.ddp_hook)
        self.lives_in_buckets = options.get("gradient_as_bucket_view", False)
        self.steps = 0

    def left(self) -> dict[str, Tensor]:
        """Returns the sum over the ranks of each parameter's residual."""
        mine = left_to_send(self.model, self.state.engine.state_dict()["state"])
        return {name: summed(residual) for name, residual in mine.items()}

    def step(self, micros: Sequence[tuple[Sequence[str], Sequence[str]]], zero: Zero = "none") -> set[str]:
        """Runs backwards, of which the last is synchronised, and checks the books; returns what counted as used.

        `micros`: for each backward what the forward takes, and what of it is in the loss.
        """
        if zero != "kept":
            self.model.zero_grad(set_to_none=zero == "none")
        for theirs, ours in zip(self.alone.parameters(), self.model.parameters(), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
        lay_in_buckets = {
            name for name, p in self.model.named_parameters() if self.lives_in_buckets and p.grad is not None
        }
        before = self.left()
        for number, (taken, lossy) in enumerate(micros):
            x = torch.randn(
                4, 6, generator=torch.Generator().manual_seed(100 * self.steps + 10 * number + dist.get_rank())
            )
            for model in (self.alone, self.ddp):
                is_local = model is self.ddp and number < len(micros) - 1
                with self.ddp.no_sync() if is_local else nullcontext():
                    outputs = dict(zip(taken, model(x, taken), strict=True))
                    torch.stack([outputs[name].square().sum() for name in lossy]).sum().backward()
        self.steps += 1
        return self._checked(before, lay_in_buckets)

    def _checked(self, before: Mapping[str, Tensor], lay_in_buckets: set[str]) -> set[str]:
        after, used = self.left(), self.counted()
        for (name, ours), theirs in zip(self.model.named_parameters(), self.alone.parameters(), strict=True):
            brought = torch.zeros(ours.numel()) if theirs.grad is None else theirs.grad.flatten()
            if name in used or name in lay_in_buckets:
                assert ours.grad is not None
                sent = ours.grad.flatten() * dist.get_world_size()
                torch.testing.assert_close(sent + after[name], summed(brought) + before[name], rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(after[name], before[name]), f"{name}: its residual changed"
                assert (ours.grad is None) == (theirs.grad is None)
                assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
            assert self.state.engine.used(name) == (name in used or name in lay_in_buckets), name
        return used

    def counted(self) -> set[str]:
        """Returns the names of what DDP itself counts as used by some rank in the last step."""
        names = [name for name, _ in self.model.named_parameters()]
        counts = self.ddp.reducer._get_local_used_map()  # None: it counts nothing, and takes all for used
        return set(names) if counts is None else {n for n, count in zip(names, counts.tolist(), strict=True) if count}


def summed(values: Tensor) -> Tensor:
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def unused_for_some_steps(options: dict[str, Any]) -> None:
    """Leaves `right` out for three steps, lets rank 0 use it alone, and then all ranks."""
    books = Books(find_unused_parameters=True, **options)
    books.step([(ALL, ALL)])
    before = books.left()["right.weight"]
    assert before.any()
    for _ in range(3):
        assert "right.weight" not in books.step([(ALL[:2], ALL[:2])])
    assert torch.equal(books.left()["right.weight"], before)
    mine = ALL if dist.get_rank() == 0 else ALL[:2]
    assert "right.weight" in books.step([(mine, mine)])
    assert not torch.equal(books.left()["right.weight"], before)
    books.step([(ALL, ALL)])


@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS, {"gradient_as_bucket_view": True}])
def test_a_residual_waits_until_a_rank_uses_its_parameter(world: World, options: dict[str, Any]) -> None:
    world(2).run(unused_for_some_steps, options)


def at_random(zero: Zero, options: dict[str, Any]) -> None:
    books = Books(find_unused_parameters=True, **options)
    rng = Random(f"{zero} {dist.get_rank()}")
    for number in range(24):
        micros = []
        for _ in range(number % 3 + 1):
            taken = [name for name in ALL if rng.random() < 0.4] or [ALL[number % 3]]
            micros.append((taken, rng.sample(taken, rng.randint(1, len(taken)))))  # others get undefined gradients
        books.step(micros, zero if number else "none")


@pytest.mark.parametrize("options", [SMALL_BUCKETS, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("zero", ["none", "zero", "kept"])
def test_a_parameter_counts_as_used_where_ddp_counts_it(world: World, zero: Zero, options: dict[str, Any]) -> None:
    world(2).run(at_random, zero, options)


def never_in_a_static_graph() -> None:
    """Loads residuals of all parameters under a static graph that lacks one of them."""
    books = Books(find_unused_parameters=True)
    books.step([(ALL, ALL)])
    saved = books.state.engine.state_dict()
    books.state.detach()
    books = Books(static_graph=True)
    with books.state.engine.at_barrier("loading"):
        books.state.engine.load_state_dict(saved)
    before = books.left()["right.weight"]
    assert before.any()
    mine = ALL[:2] if dist.get_rank() == 0 else ALL[:1]
    for _ in range(3):
        assert books.step([(mine, mine)]) == {"left.weight", "left.bias", "middle.weight", "middle.bias"}
    assert torch.equal(books.left()["right.weight"], before)


def test_a_static_graph_decides_once(world: World) -> None:
    world(2).run(never_in_a_static_graph)


def uneven(names_of_last: Sequence[str]) -> None:
    """Ends the inputs of rank 1 two steps early: what it used last counts as used from then on, as DDP has it."""
    books = Books(find_unused_parameters=True)
    with books.ddp.join():
        books.step([(ALL, ALL)])
        books.step([(names_of_last, names_of_last)])
        if dist.get_rank() == 0:
            for _ in range(2):
                books.model.zero_grad()
                books.ddp(torch.randn(4, 6), ["left"])[0].square().sum().backward()
                got = {name for name, p in books.model.named_parameters() if p.grad is not None}
                assert got == {name for name, _ in books.model.named_parameters() if books.state.engine.used(name)}
    books.step([(["middle"], ["middle"])])
    assert books.step([(ALL, ALL)]) == {name for name, _ in books.model.named_parameters()}


@pytest.mark.parametrize("names_of_last", [["left"], ["left", "right"]])
def test_a_rank_without_inputs_counts_as_ddp_counts_it(world: World, names_of_last: list[str]) -> None:
    world(2).run(uneven, names_of_last)


def state_finds_its_model() -> None:
    """Registers a state without a model, which it gets in the first backward, after some gradients are there."""
    ddp = DistributedDataParallel(Parts(), find_unused_parameters=True, **SMALL_BUCKETS)
    state = gradsync.DDPState(timeout_s=20)
    ddp.register_comm_hook(state, gradsync.ddp_hook)
    for number in range(2):
        ddp.zero_grad()
        torch.cat(ddp(torch.randn(4, 6), ALL[: number + 1]), dim=1).square().sum().backward()
        used = {name for name, _ in ddp.module.named_parameters() if state.engine.used(name)}
        assert used == {name for name, p in ddp.module.named_parameters() if p.grad is not None}
        assert {name.partition(".")[0] for name in used} == set(ALL[: number + 1])


def test_a_state_that_finds_its_model_in_backward_counts_alike(world: World) -> None:
    world(2).run(state_finds_its_model)


def attached_again(accumulating: bool) -> None:
    """Attaches again with the state of a step, whose gradients are still there, or after a backward in `no_sync`."""
    ddp = DistributedDataParallel(Parts(), find_unused_parameters=True)
    model: nn.Module = ddp.module
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), FEW)])
    torch.manual_seed(dist.get_rank())

    def backward(taken: Sequence[str]) -> None:
        torch.cat(ddp(torch.randn(4, 6), taken), dim=1).square().sum().backward()

    handle = gradsync.attach(ddp, plan=plan, timeout=20)
    backward(ALL)
    saved = handle.state_dict()
    handle.detach()
    if accumulating:
        ddp.zero_grad()
        with ddp.no_sync():
            backward(["right"])
    handle = gradsync.attach(ddp, plan=plan, timeout=20)
    handle.load_state_dict(saved)
    before = left_to_send(model, handle.state_dict()["state"])["right.weight"]
    if not accumulating:
        ddp.zero_grad()
    backward(ALL[:2])
    after = left_to_send(model, handle.state_dict()["state"])["right.weight"]
    counts = dict(zip(specs, ddp.reducer._get_local_used_map().tolist(), strict=True))
    assert bool(counts["right.weight"]) == accumulating, "DDP is the oracle"
    assert before.any() and torch.equal(before, after) != accumulating


@pytest.mark.parametrize("accumulating", [False, True], ids=["between steps", "accumulating"])
def test_gradients_of_steps_before_attach_are_not_of_the_first_one(world: World, accumulating: bool) -> None:
    world(2).run(attached_again, accumulating)


def hooks_end(options: dict[str, Any]) -> None:
    heard: list[str] = []
    original = frontend._Usage._accumulates
    frontend._Usage._accumulates = lambda self, name, _: heard.append(name) or original(self, name, _)  # type: ignore[method-assign, func-returns-value]
    try:
        books = Books(**options)
        books.step([(ALL, ALL)])
        assert len(heard) == (5 if options else 0)
        again = copy.deepcopy(books.ddp)
        again(torch.randn(4, 6), ALL)[0].sum().backward()
        books.state.detach()
        books.model(torch.randn(4, 6), ALL)[0].sum().backward()
        assert len(heard) == (5 if options else 0)
    finally:
        frontend._Usage._accumulates = original  # type: ignore[method-assign]
    del again
    books = Books(**options)
    books.step([(ALL, ALL)])
    gone = [weakref.ref(each) for each in (books.ddp, books.model, books.model.left.weight)]
    del books
    gc.collect()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_hooks_end_with_detach_and_keep_no_model(world: World, options: dict[str, Any]) -> None:
    world(2).run(hooks_end, options)
