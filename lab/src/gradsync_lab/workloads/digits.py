"""A perceptron with layer normalisation on scikit-learn's handwritten digits: a small dense job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from .convolutional import ImageWorkload
from .images import DIGITS, NUM_CLASSES

DEPTH, WIDTH = 4, 512


@dataclass(frozen=True, kw_only=True)
class DigitsWorkload(ImageWorkload):
    """Classifies digits of 8 x 8 by a perceptron of 18 tensors, 3.4 MB; `data` may be other images."""

    name: ClassVar[str] = "digits"
    title: ClassVar[str] = "Perceptron with layer normalisation"
    weight_decay: ClassVar[float] = 0.0

    batch_size: int = 32
    learning_rate: float = 0.02
    data: str = DIGITS.name

    def network(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for before in (self.images.side**2, *[WIDTH] * (DEPTH - 1)):
            layers += [nn.Linear(before, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))
