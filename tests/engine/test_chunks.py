"""Plans with coarse-grained schemes in the engine: all ranks choose alike, whatever is frozen, skipped or loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import Plan
from gradsync.bucket import TensorSpec
from gradsync.schemes import CoarseGrained
from tests.engine.models import Perceptron
from tests.engine.test_compressed import gradients_of, plan_for
from tests.world import Ranks

World = Callable[[int], Ranks]

LATE = CoarseGrained(ratio=0.25, chunk=16)
EXACT = replace(LATE, choice="exact")
both_choices = pytest.mark.parametrize("scheme", [LATE, EXACT], ids=["late", "exact"])


def places_of_two_layers(scheme: CoarseGrained) -> list[list[int]]:
    """Which chunks of the second layer arrive, step by step, once the first one of the same bucket is frozen."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), scheme)])
    handle = gradsync.attach(model, plan=plan, timeout=10)
    generator = torch.Generator().manual_seed(dist.get_rank())
    arrived = []
    for step in range(46):
        model.zero_grad()
        model[0].requires_grad_(step < 6)
        layers = model if step < 6 else model[1:]
        sum(layer(torch.randn(5, 16, generator=generator)).square().mean() for layer in layers).backward()
        sections = handle.arrived(model[1].weight)
        assert sections is not None
        arrived.append([start // scheme.chunk for start, _ in sections])
    handle.detach()
    return arrived[6:]


@both_choices
def test_what_is_frozen_stops_no_other_chunk(world: World, scheme: CoarseGrained) -> None:
    first, second = world(2).run(places_of_two_layers, scheme)
    assert first == second
    assert {chunk for chunks in first for chunk in chunks} == set(range(16)), "every chunk has its turn"


def loaded_apart(scheme: CoarseGrained) -> list[object]:
    """What arrives after rank 1, new or from elsewhere, had nothing of what is known of chunks, or something else."""
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
    for step in range(4):
        gradients_of(model, seed=step)
    saved = handle.state_dict()
    elsewhere = {key: values.flip(0) if "//" in key else values for key, values in saved["state"].items()}
    arrived = []
    for state in ({}, elsewhere):
        handle.load_state_dict({**saved, "state": state} if dist.get_rank() == 1 else saved)
        kept = handle.state_dict()["state"]
        for key, values in (state if dist.get_rank() == 1 else saved["state"]).items():
            assert "//" in key or torch.equal(kept[key], values), "what is left to be sent is a rank's own"
        for step in range(3):
            gradients_of(model, seed=10 + step)
            arrived.append([handle.arrived(parameter) for parameter in model.parameters()])
    handle.detach()
    return arrived


@pytest.mark.parametrize("scheme", [replace(LATE, max_age=3), replace(EXACT, max_age=3)], ids=["late", "exact"])
def test_ranks_that_were_given_other_scores_choose_alike(world: World, scheme: CoarseGrained) -> None:
    first, second = world(2).run(loaded_apart, scheme)
    assert first == second
