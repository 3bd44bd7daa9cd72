"""Divides the time of a training step into forward, backward, exchange, optimiser and the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..devices.streams import Moment


@dataclass(frozen=True)
class StepTimes:
    """The seconds that each part of one training step took on one rank.

    A step lasts from the end of one gradient exchange to the end of the next; `forward_s` to `other_s` add up to that.
    So `optimizer_s` is the optimiser step that follows the previous exchange. `began_s` and `ended_s` say when backward
    began and ended, in seconds after the previous exchange.
    """

    forward_s: float
    backward_s: float
    exchange_s: float
    optimizer_s: float
    other_s: float
    began_s: float
    ended_s: float
    ready_s: dict[str, float]  # by parameter, since the begin of backward

    @property
    def total_s(self) -> float:
        """The seconds of the whole step."""
        return self.forward_s + self.backward_s + self.exchange_s + self.optimizer_s + self.other_s


@dataclass
class StepMoments:
    """The moments of one training step, from the end of an exchange to the end of the next; `times` reads them.

    A moment marks a point in the device's work. An accelerator gets there later than the host: to read a moment at once
    would make the host wait.
    """

    resumed: Moment  # begin of the step
    free: Moment  # when the optimiser, or a backward without exchange, had ended
    backward_ended: Moment
    exchanged: Moment
    forward_began: Moment | None = None
    backward_began: Moment | None = None
    optimizers: list[tuple[Moment, Moment]] = field(default_factory=list)  # begin and end of each optimiser's step
    ready: dict[str, Moment] = field(default_factory=dict)  # by parameter

    def times(self) -> StepTimes:
        """Returns the times of the step, in seconds; waits until the device has ended it."""

        def at_s(moment: Moment) -> float:
            return moment.since(self.resumed)

        now_s, ended_s = at_s(self.exchanged), at_s(self.backward_ended)
        began_s = ended_s if self.backward_began is None else at_s(self.backward_began)
        forward_s = began_s - at_s(self.free if self.forward_began is None else self.forward_began)
        optimizer_s = sum(at_s(ended) - max(at_s(began), 0.0) for began, ended in self.optimizers)
        known_s = forward_s + optimizer_s + now_s - began_s
        return StepTimes(
            forward_s=forward_s,
            backward_s=ended_s - began_s,
            exchange_s=now_s - ended_s,
            optimizer_s=optimizer_s,
            other_s=max(now_s - known_s, 0.0),
            began_s=began_s,
            ended_s=ended_s,
            ready_s={name: ready.since(self.resumed) - began_s for name, ready in self.ready.items()},
        )


class Stopwatch:
    """Records when the parts of a training step begin and end; `step_ended` returns these moments.

    Where gradients accumulate, a step has several forwards and backwards. Only those whose gradients are exchanged
    count as such; the time of the others is part of `StepTimes.other_s`.
    """

    def __init__(self) -> None:
        self._step: StepMoments
        self._optimizers: list[Moment] = []  # begins of the optimisers at work, one inside the other

    def resume(self, now: Moment) -> None:
        """Begins the next step at the moment `now`; the time since the last step ended is not counted in any step."""
        self._step = StepMoments(now, now, now, now)
        self._optimizers = []

    def forward_began(self, now: Moment) -> None:
        if self._step.forward_began is None:
            self._step.forward_began = now

    def backward_began(self, now: Moment) -> None:
        self._step.backward_began = now

    def backward_returned(self, now: Moment) -> None:
        """Records that a call of backward returned, whether or not its gradients were exchanged."""
        self._step.forward_began = self._step.backward_began = None
        self._step.free = now

    def began(self, now: Moment) -> None:
        """Records the first ready gradient of an exchange; backward begins now unless `backward_began` was called."""
        if self._step.backward_began is None:
            self._step.backward_began = now

    def ready(self, name: str, now: Moment) -> None:
        self._step.ready[name] = now

    def backward_ended(self, now: Moment) -> None:
        self._step.backward_ended = now

    def optimizer_began(self, now: Moment) -> None:
        self._optimizers.append(now)

    def optimizer_ended(self, now: Moment) -> None:
        began = self._optimizers.pop() if self._optimizers else now
        if not self._optimizers:
            self._step.optimizers.append((began, now))
            self._step.free = now

    def step_ended(self, now: Moment) -> StepMoments:
        """Records the end of the gradient exchange, and returns the moments of the step, which ends with it."""
        self._step.exchanged = now
        return self._step
