"""Parts of training steps, from when things happen: forward, backward, optimiser, exchange, and the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank; its parts make up the time from the end of the exchange before to the end of its own.

    `optimizer_s` is of what the step before left to do. `began_s` and `ended_s` are those of backward, by the clock.
    """

    forward_s: float
    backward_s: float
    exchange_s: float
    optimizer_s: float
    other_s: float
    began_s: float
    ended_s: float
    ready_s: dict[str, float]  # of each parameter, since the begin of backward


class Stopwatch:
    """Told what happens, and when, by a clock that never goes back; `step_ended` gives the step.

    Of several forwards and backwards in a step those count whose gradients are exchanged: the others, of gradients that
    accumulate, are `other_s`.
    """

    def __init__(self) -> None:
        self.resume(0.0)

    def resume(self, now_s: float) -> None:
        """The next step begins; what happened since the last one ended is of none."""
        self._resumed_s = self._free_s = now_s
        self._forward_s: float | None = None
        self._backward_s: float | None = None
        self._ended_s = now_s
        self._optimizer_s = 0.0
        self._optimizers: list[float] = []  # when those began that are at work, one inside the other
        self._ready_s: dict[str, float] = {}

    def forward_began(self, now_s: float) -> None:
        if self._forward_s is None:
            self._forward_s = now_s

    def backward_began(self, now_s: float) -> None:
        self._backward_s = now_s

    def backward_returned(self, now_s: float) -> None:
        """Perhaps one without an exchange."""
        self._forward_s = self._backward_s = None
        self._free_s = now_s

    def began(self, now_s: float) -> None:
        """A gradient to be exchanged is there; backward began now if it was not seen before."""
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
        """The step whose gradients were exchanged until now."""
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
