"""Arguments of a wrong type or out of their range are refused by all ranks before any of them trains."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.frontends.arguments import DEFAULT_TIMEOUT_S, Arguments
from gradsync.planner import AveragingPlanner
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]

WRONG: dict[str, tuple[Any, ...]] = {
    "timeout": (True, "3", None, math.nan, math.inf, -1, 0, 10**30, [], timedelta(0), timedelta.max),
    "exclude": ("encoder.*", b"a", 3, None, [1], [None], {"a"}),
    "broadcast_buffers": (1, 0, "yes", None, []),
    "init_sync": (1, 0.0, "no", None),
    "static_graph": (1, "yes", None),
    "find_unused_parameters": (0, "yes", None),
    "communicator": ("mine", None, True, "OWN"),
    "verify_every": (True, 2.5, 3.0, "3", None, -1, math.nan, math.inf),
    "verify_tolerance": (True, "1", -0.1, math.nan, []),
    "optimizer": ("auto", 3, torch.optim.SGD),
    "grad_scaler": (True, 2.0, "dynamic"),
}
RIGHT: dict[str, tuple[Any, ...]] = {
    "timeout": (3, 0.5, timedelta(minutes=1)),
    "exclude": ([], ["a", "b.*"], ("a",)),
    "broadcast_buffers": (True, False),
    "verify_every": (0, 1, 10**30),
    "verify_tolerance": (0, 1e-3, math.inf, None),
    "communicator": ("own", "shared"),
}
READS = [(name, value) for name, values in WRONG.items() for value in values]


def read(**given: Any) -> Arguments:
    return Arguments.read(given.pop("timeout", DEFAULT_TIMEOUT_S), **given)


def test_every_argument_is_among_them() -> None:
    assert {*WRONG} == {each.name for each in fields(Arguments)} - {"refusal"}


@pytest.mark.parametrize(("name", "value"), READS, ids=str)
def test_a_wrong_argument_is_named_with_its_value_and_leaves_all_defaults(name: str, value: Any) -> None:
    found = read(**{"init_sync": False, name: value})
    assert found.refusal.startswith(name) and " must be " in found.refusal and ", got " in found.refusal
    assert found == Arguments(refusal=found.refusal)


@pytest.mark.parametrize(("name", "value"), [(n, value) for n, values in RIGHT.items() for value in values], ids=str)
def test_a_right_argument_is_taken_as_it_is(name: str, value: Any) -> None:
    found = read(**{name: value})
    taken = value.total_seconds() if isinstance(value, timedelta) else tuple(value) if name == "exclude" else value
    assert not found.refusal and getattr(found, name) == taken


WAYS = ["attach", "class", "ddp", "averaging"]
REFUSED = [
    ({"timeout": "3"}, "timeout must be a number, got '3'"),
    ({"timeout": 10**30}, "timeout must be in (0, 1000000000.0], got 1000000"),
    ({"exclude": "layers.*"}, "exclude must be a list, got 'layers.*'"),
    ({"grad_scaler": 2.0}, "grad_scaler must be an instance of GradScaler or None, got 2.0"),
    ({"optimizer": "auto"}, "optimizer must be an instance of Optimizer or None, got 'auto'"),
    ({"verify_every": -1}, "verify_every must be at least 0, got -1"),
    ({"verify_every": True}, "verify_every must be a whole number, got True"),
    ({"verify_tolerance": math.nan}, "verify_tolerance must be at least 0 or None, got nan"),
    ({"communicator": "mine"}, "communicator must be 'own' or 'shared', got 'mine'"),
]


def attach(way: str, mine: list[dict[str, Any]]) -> str:
    model: nn.Module = Perceptron()
    settings = {"timeout": 20, **mine[dist.get_rank()]}
    if way == "averaging":
        optimizer = settings.pop("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
        settings |= {"plan": AveragingPlanner(), "optimizer": optimizer}
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        if way == "class":
            gradsync.DistributedDataParallel(model, **settings)
        else:
            gradsync.attach(DistributedDataParallel(model) if way == "ddp" else model, **settings)
    gradsync.attach(Perceptron() if way == "ddp" else model, timeout=20).detach()  # nothing is left behind
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_argument_is_told_on_every_rank_also_if_only_one_has_it(world: World, way: str) -> None:
    for bad, message in REFUSED if way == "attach" else REFUSED[::3]:
        for texts in (world(2).run(attach, way, [bad, bad]), world(2).run(attach, way, [{}, bad])):
            assert all(message in text for text in texts), texts


FLAGS = [
    {"broadcast_buffers": 0},
    {"forward_sync_buffers": 0},
    {"forward_sync_buffers": "no"},
    {"init_sync": "no"},
    {"static_graph": 1},
    {"find_unused_parameters": "yes"},
    {"device_ids": 0},
    {"device_ids": ["cpu"]},
    {"bucket_cap_mb_list": "25"},
    {"bucket_cap_mb_list": [math.nan]},
]


def wrap_wrongly() -> list[str]:
    texts = []
    for flag in FLAGS:
        with pytest.raises(ValueError) as caught:
            gradsync.DistributedDataParallel(Perceptron(), timeout=20, **flag)
        texts.append(str(caught.value))
    for wrong in (None, "x", Perceptron):
        for make in (gradsync.DistributedDataParallel, gradsync.attach):
            with pytest.raises(TypeError, match="must be a torch.nn.Module, got"):
                make(wrong)  # type: ignore[operator]
    for group in ("world", 3, []):
        with pytest.raises(TypeError, match="process_group must be a torch.distributed.ProcessGroup or None, got"):
            gradsync.attach(Perceptron(), process_group=group)  # type: ignore[arg-type]
    return texts


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_the_class_and_attach_cannot_begin_with_is_told_at_once(world: World) -> None:
    for texts in world(2).run(wrap_wrongly):
        assert all(text.startswith(next(iter(flag))) for flag, text in zip(FLAGS, texts, strict=True)), texts


OF_A_HOOK = ("timeout", "exclude", "optimizer", "grad_scaler", "verify_every", "verify_tolerance")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OF_A_HOOK for value in WRONG[name]], ids=str)
def test_a_state_of_a_hook_is_refused_when_it_is_made(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}.* must be .*, got "):
        gradsync.DDPState(**{"timeout_s" if name == "timeout" else name: value})


def test_a_state_of_a_hook_keeps_its_settings_through_pickle() -> None:
    with pytest.raises(TypeError, match="model must be a DistributedDataParallel or None, got 3"):
        gradsync.DDPState(3)  # type: ignore[arg-type]
    made = gradsync.DDPState(timeout_s=7, exclude=["a"], verify_every=5, verify_tolerance=0.5)
    copied = pickle.loads(pickle.dumps(made))
    assert copied._arguments == made._arguments == Arguments(7, ("a",), verify_every=5, verify_tolerance=0.5)
