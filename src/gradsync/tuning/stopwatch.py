"""Divides training steps into forward, backward, exchange, optimiser and the rest, by the times of their events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Times of one step on one rank; its parts add up to the time from the last exchange's end to its own's.

    `optimizer_s` is the optimiser's work that follows the step before. `began_s` and `ended_s` are backward's, by the
    clock.
    """

    forward_s: float
    backward_s: float
    exchange_s: float
    optimizer_s: float
    other_s: float
    began_s: float
    ended_s: float
    ready_s: dict[str, float]  # by parameter, since the begin of backward


class Stopwatch:
    """Takes events with their times, by a clock that never goes back; `step_ended` returns the step.

    Where gradients accumulate, a step has several forwards and backwards: those whose gradients are exchanged count,
    and the others are part of `other_s`.
    """

    def __init__(self) -> None:
        self.resume(0.0)

    def resume(self, now_s: float) -> None:
        """Begins the next step; the time since the last one ended belongs to no step."""
        self._resumed_s = self._free_s = now_s
        self._forward_s: float | None = None
        self._backward_s: float | None = None
        self._ended_s = now_s
        self._optimizer_s = 0.0
        self._optimizers: list[float] = []  # begins of the optimisers at work, one inside the other
        self._ready_s: dict[str, float] = {}

    def forward_began(self, now_s: float) -> None:
        if self._forward_s is None:
            self._forward_s = now_s

    def backward_began(self, now_s: float) -> None:
        self._backward_s = now_s

    def backward_returned(self, now_s: float) -> None:
        """Takes the end of a backward call, perhaps of one without an exchange."""
        self._forward_s = self._backward_s = None
        self._free_s = now_s

    def began(self, now_s: float) -> None:
        """Takes the first gradient to be exchanged; backward begins now unless `backward_began` came before."""
        if self._backward_s is None:
            self._backward_s = now_s

    def ready(self, name: str, now_s: float) -> None:
        self._ready_s[name] = now_s

    def backward_ended(self, now_s: float) -> None:
        self._ended_s = now_s

    def optimizer_began(self, now_s: float) -> None:
        self._optimizers.append(now_s)

    def optimizer_ended(self, now_s: float) -> None:
        began_s = self._optimizers.pop() if self._optimizers else now_s
        if not self._optimizers:
            self._optimizer_s += now_s - max(began_s, self._resumed_s)
            self._free_s = now_s

    def step_ended(self, now_s: float) -> StepTimes:
        """Returns the step whose exchange ends now."""
        began_s = self._ended_s if self._backward_s is None else self._backward_s
        forward_s = began_s - (self._free_s if self._forward_s is None else self._forward_s)
        known_s = forward_s + self._optimizer_s + now_s - began_s
        return StepTimes(
            forward_s=forward_s,
            backward_s=self._ended_s - began_s,
            exchange_s=now_s - self._ended_s,
            optimizer_s=self._optimizer_s,
            other_s=max(now_s - self._resumed_s - known_s, 0.0),
            began_s=began_s,
            ended_s=self._ended_s,
            ready_s={name: ready_s - began_s for name, ready_s in self._ready_s.items()},
        )
