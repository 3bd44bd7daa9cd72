"""`Observations`: what the first training steps showed of gradients, by which planners plan. Pure data, as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from ..tensors.bucket import TensorSpec
from ..tensors.density import ParameterProfile
from .document import Document
from .profile import MOST_COUNT, ParameterObservation


class Observations(Document):
    """The order, layouts and densities of a job's gradients as the ranks agreed on them, and the plan made of them.

    Attributes:
        version: the version of the JSON format, 1.
        plan: the digest of the plan.
        steps_left: the number of coming steps whose gradients the plan is to be made anew from.
        parameters: in the model's order.
    """

    noun = "record of the first steps"
    by_lines = ("parameters",)

    version: int = 1
    plan: str
    steps_left: Annotated[int, Field(ge=0, le=MOST_COUNT)]
    parameters: tuple[ParameterObservation, ...]

    @classmethod
    def of(cls, profiles: Iterable[ParameterProfile], plan: str, steps_left: int) -> Observations:
        """Returns a record of these profiles, of the plan with the digest `plan`, and of the steps left to observe."""
        parameters = tuple(ParameterObservation.of(p, p.position) for p in profiles)
        return cls(plan=plan, steps_left=steps_left, parameters=parameters)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The shape and dtype of each parameter, by name."""
        return {p.name: p.tensor for p in self.parameters}

    def parameter_profiles(self) -> list[ParameterProfile]:
        """Returns what planners need of each parameter, in model order: shape, dtype, densities, order of readiness."""
        return [p.profile() for p in self.parameters]
