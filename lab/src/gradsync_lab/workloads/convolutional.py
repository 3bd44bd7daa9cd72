"""Image classification by convolutional networks: residual networks of many small tensors, and one of a single big
tensor.

All gradients are dense. There is neither dropout nor augmentation: the loss depends on weights and batch alone, so that
a step can be repeated. A training forward moves the running statistics of batch normalization, which no loss uses.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from gradsync.optim.lars import LARS

from .base import Batch
from .classification import ClassificationWorkload
from .data import Array
from .images import DIGITS, FASHION, HELD_OUT_RATIO, IMAGE_SETS, NUM_CLASSES, ImageSet, open_images

EVALUATION_IMAGES = 2_000
EVALUATION_BATCH = 100
MOMENTUM = 0.9
TRUST = 0.06  # large, so that the learning rate is small, which LARS does not adapt for biases and norms
STAGES = (16, 32, 64)  # channels of He et al.'s stages for small images
LARGE_SIDE = 16  # the first convolution halves images of this side or more: a step costs a quarter


def stem_stride(images: ImageSet) -> int:
    return 2 if images.side >= LARGE_SIDE else 1


def convolution(inputs: int, outputs: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    """Returns a convolution without bias, followed by batch normalization, which has a bias."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut.

    Where the number of channels changes, the shortcut is a convolution of size 1.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = convolution(inputs, outputs, stride=stride)
        self.second = convolution(outputs, outputs)
        self.shortcut = nn.Identity() if stride == 1 else convolution(inputs, outputs, size=1, stride=stride)

    def forward(self, states: Tensor) -> Tensor:
        """Returns (batch, outputs, side, side) float32 for `states` (batch, inputs, side, side).

        Where `outputs` differs from `inputs`, the returned side is half as long.
        """
        return functional.relu(self.second(functional.relu(self.first(states))) + self.shortcut(states))


class ResNet(nn.Module):
    """The residual network of `depth` = 6n + 2 layers for small images (He et al., 2016, section 4.2)."""

    def __init__(self, depth: int, stride: int) -> None:
        super().__init__()
        blocks_per_stage = (depth - 2) // 6
        self.stem = convolution(1, STAGES[0], stride=stride)
        channels = [STAGES[0], *(stage for stage in STAGES for _ in range(blocks_per_stage))]
        self.blocks = nn.Sequential(*(ResidualBlock(*step) for step in pairwise(channels)))
        self.classifier = nn.Linear(STAGES[-1], NUM_CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (batch, 10) float32 for `images` (batch, 1, side, side) float32."""
        states = self.blocks(functional.relu(self.stem(images)))
        logits: Tensor = self.classifier(states.mean(dim=(2, 3)))
        return logits


class AlexNet(nn.Module):
    """A small network after Krizhevsky et al. (2012): convolutions, then a wide layer with 98 % of all parameters."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4**2, 2048), nn.ReLU(), nn.Linear(2048, NUM_CLASSES)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # the linear layers start smaller, or the first steps blow up
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (batch, 10) float32 for `images` (batch, 1, side, side) float32."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


@dataclass(frozen=True, kw_only=True)
class ImageWorkload(ClassificationWorkload):
    """Classifies images into ten classes; trained by SGD with momentum, or LARS."""

    real: ClassVar[str] = FASHION.name
    stand_in: ClassVar[str] = DIGITS.name
    held_out_ratio: ClassVar[float] = HELD_OUT_RATIO
    evaluation_samples: ClassVar[int | None] = EVALUATION_IMAGES
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH
    title: ClassVar[str]
    weight_decay: ClassVar[float]

    batch_size: int = 64  # images a rank and step
    lars: float = 0.0  # the learning rate of LARS, for large batches; 0: SGD at `learning_rate`
    trust: float = TRUST  # for LARS only, as the next two
    warmup_steps: int = 0
    decay_steps: int = 0  # 0: the rate does not fall
    data: str = FASHION.name

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lars < math.inf:
            raise ValueError(f"lars must be finite and not negative, got {self.lars}")
        if not 0 < self.trust < math.inf:
            raise ValueError(f"trust must be positive and finite, got {self.trust}")
        for name in ("warmup_steps", "decay_steps"):
            if (steps := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {steps}")
            if steps and not self.lars:
                raise ValueError(f"{name} are of LARS: give its learning rate (lars) too, got {steps}")

    def open(self, cache: Path) -> tuple[Array, str]:
        return open_images(self.data, cache)

    @property
    def images(self) -> ImageSet:
        """Returns the image set in use: Fashion-MNIST, or the digits that stand in for it."""
        return IMAGE_SETS[self.source]

    def batch(self, rows: Array) -> Batch:
        """Returns images (batch, 1, side, side) float32, of mean 0 and deviation 1, and labels (batch,) int64."""
        samples, images = self._opened[0][rows], self.images
        pixels = (samples[:, :-1].astype(np.float32) - images.mean) / images.deviation
        labels = torch.from_numpy(samples[:, -1].astype(np.int64))
        return torch.from_numpy(pixels).view(-1, 1, images.side, images.side), labels

    @abstractmethod
    def network(self) -> nn.Module:
        """Returns a network whose weights are drawn from torch's global generator."""

    def model(self, *, sparse: bool, seed: int = 0) -> nn.Module:
        """Returns a fresh network for the open images; `sparse` changes nothing, as there is no embedding."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns SGD with momentum and weight decay, as in the networks' papers; LARS with the same if `lars` > 0."""
        if self.lars:
            return LARS(
                model.parameters(),
                lr=self.lars,
                momentum=MOMENTUM,
                weight_decay=self.weight_decay,
                trust=self.trust,
                warmup_steps=self.warmup_steps,
                decay_steps=self.decay_steps or None,
            )
        return SGD(model.parameters(), lr=self.learning_rate, momentum=MOMENTUM, weight_decay=self.weight_decay)

    def describe(self) -> str:
        sizes = [parameter.numel() for parameter in self.model(sparse=False).parameters()]
        return (
            f"{self.title}, {sum(sizes) / 1e6:.3f} M parameters ({len(sizes)} dense tensors, the largest "
            f"{max(sizes) / sum(sizes):.1%}), batch {self.batch_size} a rank; {self.num_samples:,} {self.images.title} "
            f"of {self.images.side} x {self.images.side}"
        )


@dataclass(frozen=True, kw_only=True)
class ResNetWorkload(ImageWorkload):
    """Trains He et al.'s residual network for small images, which has many small tensors."""

    depth: ClassVar[int]
    weight_decay: ClassVar[float] = 1e-4

    learning_rate: float = 0.1

    def network(self) -> ResNet:
        return ResNet(self.depth, stem_stride(self.images))


@dataclass(frozen=True, kw_only=True)
class ResNet8(ResNetWorkload):
    """A ResNet of 29 tensors, 0.3 MB."""

    name: ClassVar[str] = "resnet8"
    title: ClassVar[str] = "ResNet-8"
    depth: ClassVar[int] = 8


@dataclass(frozen=True, kw_only=True)
class ResNet20(ResNetWorkload):
    """A ResNet of 65 tensors, 1.1 MB."""

    name: ClassVar[str] = "resnet20"
    title: ClassVar[str] = "ResNet-20"
    depth: ClassVar[int] = 20


@dataclass(frozen=True, kw_only=True)
class ResNet32(ResNetWorkload):
    """A ResNet of 101 tensors, 1.9 MB."""

    name: ClassVar[str] = "resnet32"
    title: ClassVar[str] = "ResNet-32"
    depth: ClassVar[int] = 32


@dataclass(frozen=True, kw_only=True)
class AlexNetWorkload(ImageWorkload):
    """An AlexNet of 10 tensors, 8.6 MB, 98 % of the bytes in one tensor."""

    name: ClassVar[str] = "alexnet"
    title: ClassVar[str] = "AlexNet of three convolutions"
    weight_decay: ClassVar[float] = 5e-4

    learning_rate: float = 0.01

    def network(self) -> AlexNet:
        return AlexNet(stem_stride(self.images))
