"""The models of the papers' evaluations, as data: gradients in the order in which they become ready.

Each JSON file of this package names its source: `traced` gaps are the authors' measurements, `modelled` gaps are
computed from the layers' operations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

PAPER_MODELS = ("alexnet", "vgg16", "resnet50", "resnet101", "ugatit", "bert-base", "gpt2", "lstm")


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient, and backward's time since the gradient before it was ready."""

    name: str
    elements: int
    gap_s: float


@dataclass(frozen=True)
class PaperModel:
    """A model's gradients in ready order, with backward's seconds from one to the next on the papers' hardware."""

    name: str
    traced: bool  # else the gaps are modelled
    source: str
    gradients: tuple[Gradient, ...]

    @property
    def backward_s(self) -> float:
        """Returns the seconds of backward until the last gradient is ready."""
        return sum(gradient.gap_s for gradient in self.gradients)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(gradient.gap_s for gradient in self.gradients)

    @property
    def nbytes(self) -> tuple[float, ...]:
        """Returns the float32 bytes of each gradient."""
        return tuple(4.0 * gradient.elements for gradient in self.gradients)


def paper_model(name: str) -> PaperModel:
    """Returns the model of this name.

    Raises:
        ValueError: `name` is not in `PAPER_MODELS`.
    """
    if name not in PAPER_MODELS:
        raise ValueError(f"unknown model {name!r}, choose one of {', '.join(PAPER_MODELS)}")
    found = json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    gradients = tuple(Gradient(label, elements, 1e-6 * gap_us) for label, elements, gap_us in found["tensors"])
    return PaperModel(found["model"], found["gaps"] == "traced", found["source"], gradients)
