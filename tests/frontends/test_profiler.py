"""`torch.profiler` shows the turns of a step as ranges of gradsync."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gradsync
from tests.world import Ranks


def turns_are_ranges() -> None:
    """Profiles one step of a model with an embedding and a dense layer on this rank."""
    model = nn.Sequential(nn.Embedding(500, 8, sparse=True), nn.Flatten(), nn.Linear(16, 1))
    handle = gradsync.attach(model)
    batch = torch.arange(6).view(3, 2)
    model(batch).sum().backward()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    # acc_events: without it, torch 2.11 warns of further cycles, of which there are none.
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread, acc_events=True) as profiler:
        model(batch).sum().backward()
    turns = {f"gradsync::bucket {bucket} {stage}" for bucket, stage in handle.plan.order}
    found = {event.key for event in profiler.key_averages() if event.key.startswith("gradsync::")}
    handle.detach()
    assert "gradsync::finish" in found and turns <= found, (turns, found)
    assert any("wait for" in name for name in found)


def test_a_step_shows_each_turn_its_wait_and_the_end(world: Callable[[int], Ranks]) -> None:
    world(2).run(turns_are_ranges)
