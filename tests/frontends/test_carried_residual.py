"""Residuals that a new plan does not keep are sent once, with the next gradients, whatever comes in between.

On every rank the gradients that came in are those that came out plus the residuals that are left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.schemes import AllReduce, CoarseGrained, CompressedAllGather, CompressedTwoWay, Scheme
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.conservation import left_to_send
from tests.world import Ranks

World = Callable[[int], Ranks]
FEEDBACK = ErrorFeedback(TopK(0.2))
EXACT, TWO_WAY, GATHERED = AllReduce(), CompressedTwoWay(FEEDBACK), CompressedAllGather(FEEDBACK)
CHUNKS = CoarseGrained(ratio=0.2, chunk=3)


class Branches(nn.Module):
    """Two layers; a step may leave either of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 4)

    def forward(self, x: Tensor, parts: str) -> Tensor:
        return torch.cat([layer(x) for name, layer in self.named_children() if name in parts], dim=1)


class Books:
    """An attached model beside a plain copy: sums of the gradients that came in on this rank and that came out."""

    def __init__(self, scheme: Scheme[Any]) -> None:
        torch.manual_seed(0)
        self.model = Branches()
        self.alone = copy.deepcopy(self.model)
        self.handle = gradsync.attach(self.model, plan=self.plan(scheme), timeout=10)
        self.came_in = {name: torch.zeros(p.numel()) for name, p in self.model.named_parameters()}
        self.came_out = copy.deepcopy(self.came_in)
        self.steps = 0

    def plan(self, scheme: Scheme[Any], cut: bool = False) -> Plan:
        specs = {name: TensorSpec.of(p) for name, p in self.model.named_parameters()}
        whole = [(name, 0, spec.numel) for name, spec in specs.items()]
        parts = [[("left.weight", 0, 7), whole[1]], [("left.weight", 7, 30), *whole[2:]]] if cut else [whole]
        return Plan.make(specs, dist.get_world_size(), [(part, scheme) for part in parts])

    def switch(self, scheme: Scheme[Any], *, cut: bool = False) -> None:
        """Changes to a plan with this scheme from the next step on."""
        self.handle._engine.propose([self.plan(scheme, cut)])

    def reload(self) -> None:
        """Saves and loads the state, as a checkpoint does."""
        self.handle.load_state_dict(self.handle.state_dict())

    def backward(self, model: nn.Module, parts: str, factor: float) -> None:
        generator = torch.Generator().manual_seed(10 * self.steps + dist.get_rank())
        if parts:
            (factor * model(torch.randn(5, 6, generator=generator), parts)).square().sum().backward()

    def step(self, parts: str = "left right", *, local: int = 0, keep: bool = False, factor: float = 1.0) -> None:
        """Runs `parts` local backwards and one that synchronises; a step that is not finite counts for nothing."""
        for model in (self.model, self.alone):
            for p in model.parameters():
                p.grad = p.grad if keep and model is self.model else None
        before = {n: torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for n, p in self.named()}
        for _ in range(local):
            with self.handle.no_sync():
                self.backward(self.model, parts, 1.0)
            self.backward(self.alone, parts, 1.0)
        self.backward(self.model, parts, factor)
        self.backward(self.alone, parts, factor)
        self.steps += 1
        grads = [p.grad for _, p in self.named() if p.grad is not None]
        if not all(bool(grad.isfinite().all()) for grad in grads):
            return
        used = [torch.tensor(float(p.grad is not None)) for p in self.alone.parameters()]
        for flag in used:
            dist.all_reduce(flag)
        for (name, p), own, by in zip(self.named(), self.alone.parameters(), used, strict=True):
            if by:
                assert p.grad is not None
                self.came_in[name] += before[name] + (0.0 if own.grad is None else own.grad.flatten())
                self.came_out[name] += dist.get_world_size() * p.grad.flatten()

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    @property
    def left(self) -> dict[str, Tensor]:
        return left_to_send(self.model, self.handle.state_dict()["state"])

    def close(self, *, empty: bool) -> None:
        """Whether the sums agree; with `empty` also whether no residual is left."""
        left = self.left
        for name, total in self.came_in.items():
            sent = total - left[name]
            dist.all_reduce(sent)
            torch.testing.assert_close(sent, self.came_out[name], rtol=1e-4, atol=1e-4, msg=name)
        assert not (empty and any(values.any() for values in left.values()))
        self.handle.detach()


def begun(scheme: Scheme[Any]) -> Books:
    """Returns books after some steps, with a residual for every parameter."""
    books = Books(scheme)
    books.step()
    books.step()
    assert all(bool(values.any()) for values in books.left.values())
    return books


def no_rank_uses_a_part(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    books.switch(EXACT)
    books.step("left")
    left = books.left
    assert not left["left.weight"].any() and left["right.weight"].any(), "it waits for a gradient to go with"
    books.step("left")
    books.step()
    books.close(empty=True)


def one_rank_uses_a_part(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    books.switch(EXACT, cut=True)
    books.step("left right" if dist.get_rank() == 0 else "left")
    books.close(empty=True)


def gradients_accumulate(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    books.switch(EXACT)
    books.step(local=2)
    books.step(keep=True)
    books.close(empty=True)


def steps_are_skipped(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    books.switch(EXACT, cut=True)
    before = books.left
    for bad in (0, 1):
        books.step(factor=torch.inf if dist.get_rank() == bad else 1.0)
        assert all(bool(p.grad.isnan().all()) for _, p in books.named() if p.grad is not None)
        for name, values in books.left.items():
            torch.testing.assert_close(values, before[name])
    books.step()
    books.close(empty=True)


def skipped_and_switched_at_once(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    books.switch(EXACT)
    books.step(factor=torch.nan if dist.get_rank() == 1 else 1.0)
    books.switch(TWO_WAY, cut=True)
    books.step()
    books.switch(EXACT)
    books.step()
    books.close(empty=True)


def plans_change_at_every_step(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    for number, other in enumerate((EXACT, GATHERED, EXACT, TWO_WAY, GATHERED, EXACT)):
        books.switch(other, cut=number % 2 == 0)
        books.step("left" if number % 3 == 0 else "left right")
    books.step()
    books.close(empty=True)


def plans_change_before_a_step_was_made(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    for other in (EXACT, TWO_WAY, EXACT):
        books.switch(other)
    books.step()
    books.close(empty=True)


def saved_between(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    books.switch(EXACT)
    books.reload()  # the plan changes at the next step
    books.step("left")
    books.reload()  # a part has been sent
    books.step()
    books.reload()
    books.step()
    books.close(empty=True)


def frozen_afterwards(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    books.switch(EXACT)
    for model in (books.model, books.alone):
        model.right.requires_grad_(False)
    books.step()
    books.switch(GATHERED, cut=True)
    books.step()
    books.switch(EXACT)
    books.step()
    left = books.left
    assert left["right.weight"].any() and not left["left.weight"].any(), "what is frozen keeps what is left"
    for model in (books.model, books.alone):
        model.right.requires_grad_(True)
    books.step()
    books.close(empty=True)


def one_rank_alone_carries(scheme: Scheme[Any]) -> None:
    books = begun(scheme)
    state = books.handle.state_dict()
    if dist.get_rank() == 0:
        books.handle.load_state_dict(state)
    else:
        books.handle.load_state_dict({**state, "state": {}})
        for name, values in left_to_send(books.model, state["state"]).items():
            books.came_in[name] -= values  # lost with the checkpoint of this rank
    books.switch(EXACT)
    books.step("left", factor=torch.inf if dist.get_rank() == 1 else 1.0)
    for p in books.model.left.parameters():
        assert p.grad is not None and p.grad.isnan().all(), "also on the rank that carries nothing"
    books.step("left")
    books.step()
    books.close(empty=True)


STORIES = [
    no_rank_uses_a_part,
    one_rank_uses_a_part,
    gradients_accumulate,
    steps_are_skipped,
    skipped_and_switched_at_once,
    plans_change_at_every_step,
    plans_change_before_a_step_was_made,
    saved_between,
    frozen_afterwards,
    one_rank_alone_carries,
]


@pytest.mark.parametrize("scheme", [GATHERED, TWO_WAY, CHUNKS], ids=["gathered", "two ways", "chunks"])
@pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])
def test_a_carried_residual_is_sent_once(
    world: World, story: Callable[[Scheme[Any]], None], scheme: Scheme[Any]
) -> None:
    world(2).run(story, scheme)
