"""`LossScale` gives the scaler's value, from a copy begun before if nothing has changed since."""

from __future__ import annotations

import torch

from gradsync.devices.streams import NoStreams
from gradsync.engine.loss_scale import LossScale


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
