"""Divides the time of a training step into forward, backward, exchange, optimiser and the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Times of one training step on one rank: its parts, which add up to the time between two ends of an exchange.

    A step ends with its gradient exchange, so `optimizer_s` is the optimiser step after the exchange before. `began_s`
    and `ended_s` are the clock times of backward.
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
    """Records the times of a training step's events, by a monotonic clock; `step_ended` returns them as `StepTimes`.

    Where gradients accumulate, a step has several forwards and backwards: only those whose gradients are exchanged
    count as such, and the time of the rest is part of `other_s`.
    """

    def __init__(self) -> None:
        self.resume(0.0)

    def resume(self, now_s: float) -> None:
        """Begins the next step now; the time since the last step ended is not counted in any step."""
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
        """Records that a call of backward returned; its gradients may or may not have been exchanged."""
        self._forward_s = self._backward_s = None
        self._free_s = now_s

    def began(self, now_s: float) -> None:
        """Records the first ready gradient of an exchange: backward begins now unless `backward_began` was called."""
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
        """Records the end of the gradient exchange, and returns the times of the step, which ends with it."""
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
