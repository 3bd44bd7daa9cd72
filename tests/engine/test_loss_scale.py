"""`LossScale` gives the scaler's value, from a copy begun before if nothing has changed since."""

from __future__ import annotations

import pytest
import torch

from gradsync.comm import LocalGroup, run_local
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.devices.streams import NoStreams
from gradsync.engine.engine import Engine
from gradsync.engine.loss_scale import LossScale
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, CompressedAllGather, MajorityVote
from gradsync.tensors.bucket import TensorSpec


class Counting(torch.amp.GradScaler):
    """A scaler that counts how often its value is waited for."""

    waits = 0

    def get_scale(self) -> float:
        self.waits += 1
        return super().get_scale()


def used() -> Counting:
    scaler = Counting("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    return scaler


def test_a_copy_that_was_begun_is_waited_for_by_nobody() -> None:
    scaler = used()
    scale = LossScale(scaler, NoStreams())
    assert (scale.value(), scaler.waits) == (8.0, 1), "nobody has looked"
    scale.look()
    assert (scale.value(), scale.value(), scaler.waits) == (8.0, 8.0, 1)


def test_a_change_after_the_look_is_seen() -> None:
    scaler = used()
    scale = LossScale(scaler, NoStreams())
    scale.look()
    scaler.update(new_scale=4.0)
    assert (scale.value(), scaler.waits) == (4.0, 1)
    scale.look()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scale.value() == 2.0


def test_an_unused_or_disabled_scaler_has_its_first_value() -> None:
    for scaler, value in ((Counting("cpu", init_scale=8.0), 8.0), (Counting("cpu", enabled=False), 1.0)):
        scale = LossScale(scaler, NoStreams())
        scale.look()
        assert scale.value() == value


def residuals(group: LocalGroup, plans: list[str]) -> list[float]:
    """Trains a step by each of these plans, while the loss scale doubles; returns what is left after the last."""
    parameters, gradients = {"w": torch.zeros(8)}, torch.arange(1.0, 9.0)
    specs = {"w": TensorSpec.of(parameters["w"])}
    schemes = {"exact": AllReduce(), "lossy": CompressedAllGather(ErrorFeedback(TopK(1 / 8)))}
    made = {name: Plan.make(specs, group.size, [(["w"], scheme)]) for name, scheme in schemes.items()}
    engine, scaler = Engine(parameters, group, made[plans[0]], timeout_s=20), used()
    engine.follow_loss_scale(scaler)
    for step, name in enumerate(plans):
        scaler.update(new_scale=4.0 * 2**step)
        engine.forward_begins()
        if step and name != plans[step - 1]:
            engine.propose([made[name]])
        engine.begin()
        engine.load("w", gradients * 4.0 * 2**step)
        engine.finish()
        engine.stepped()
    saved = engine.state_dict()
    engine.close()
    left = sum(saved["state"].values(), torch.zeros(8)) / saved["loss_scale"]
    return [float(value) for value in left]


ONCE, TWICE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 0.0, 8.0]


@pytest.mark.parametrize(
    ("plans", "left"),
    [
        (["lossy", "lossy"], TWICE),
        (["exact", "lossy"], ONCE),
        (["exact", "lossy", "lossy"], TWICE),
        (["lossy", "exact", "lossy"], ONCE),
        (["lossy", "exact", "exact", "lossy", "lossy"], TWICE),
    ],
    ids=str,
)
def test_residuals_follow_the_scale_through_changes_of_plans(plans: list[str], left: list[float]) -> None:
    assert run_local(2, lambda group: residuals(group, plans)) == [left] * 2


def offered_votes(group: LocalGroup, *, enabled: bool) -> str:
    """Proposes a plan of votes beside a scaler; returns the error, or the name of the scheme that runs."""
    parameters = {"w": torch.zeros(8)}
    exact, votes = (
        Plan.make({"w": TensorSpec.of(parameters["w"])}, group.size, [(["w"], scheme)])
        for scheme in (AllReduce(), MajorityVote())
    )
    engine = Engine(parameters, group, exact, timeout_s=20)
    engine.follow_loss_scale(torch.amp.GradScaler("cpu", enabled=enabled))
    try:
        engine.replan(votes)
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return engine.plan.buckets[0].scheme.name


@pytest.mark.parametrize(
    ("enabled", "said"), [(True, "result does not follow the loss scale"), (False, "majority_vote")]
)
def test_later_plans_whose_results_do_not_follow_the_scale_are_refused(enabled: bool, said: str) -> None:
    assert all(said in each for each in run_local(2, lambda group: offered_votes(group, enabled=enabled)))
