"""The models on which the papers were judged, as data: gradients in the order they become ready.

Each file beside this one says where its numbers come from: `traced` gaps are the authors' measurements, `modelled`
ones ours, from the layers' operations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

PAPER_MODELS = ("alexnet", "vgg16", "resnet50", "resnet101", "ugatit", "bert-base", "gpt2", "lstm")


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient, and backward's time since the one before it was ready."""

    name: str
    elements: int
    gap_s: float


@dataclass(frozen=True)
class PaperModel:
    """A model and its backward on the papers' hardware."""

    name: str
    traced: bool  # else the gaps are modelled
    source: str
    gradients: tuple[Gradient, ...]

    @property
    def backward_s(self) -> float:
        """From the first gradient to the last."""
        return sum(gradient.gap_s for gradient in self.gradients)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(gradient.gap_s for gradient in self.gradients)

    @property
    def nbytes(self) -> tuple[float, ...]:
        """Of each gradient, in float32."""
        return tuple(4.0 * gradient.elements for gradient in self.gradients)


def paper_model(name: str) -> PaperModel:
    """
    Raises:
        ValueError: where there is none of that name.
    """
    if name not in PAPER_MODELS:
        raise ValueError(f"unknown model {name!r}, choose one of {', '.join(PAPER_MODELS)}")
    found = json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    gradients = tuple(Gradient(label, elements, 1e-6 * gap_us) for label, elements, gap_us in found["tensors"])
    return PaperModel(found["model"], found["gaps"] == "traced", found["source"], gradients)
