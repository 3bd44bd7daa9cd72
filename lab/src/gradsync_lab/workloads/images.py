"""Small grey images of ten classes: Fashion-MNIST, and scikit-learn's digits where Fashion-MNIST is not available.

Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017; MIT) has 70,000 photographs of clothing, here as Debian packages them; its
own 10,000 test images are the last ones. The digits are 1,797 handwritten ones that come with scikit-learn (BSD), in a
fixed random order: a smaller and easier task, but real data too.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .data import Array, DebianFile, cached_array, fetch_debian, gunzipped, real_or_stand_in

logger = logging.getLogger(__name__)

PACKAGE = DebianFile(
    package="dataset-fashion-mnist", path=Path("/usr/share/datasets/fashion-mnist"), kept_as="fashion-mnist"
)
# Training, then test; SHA-256 of the uncompressed content.
IMAGES = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
}
LABELS = {
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
NUM_CLASSES = 10
HELD_OUT_RATIO = 1 / 7  # of Fashion-MNIST, the test images
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class ImageSet:
    """A set of square images; a row of its samples, uint8, is an image and then its label."""

    name: str
    title: str
    num_images: int
    side: int
    mean: float  # of all its pixels, as they are stored
    deviation: float
    prepare: Callable[[Path], Array]  # from a cache directory

    def load(self, cache: Path) -> Array:
        """Returns all samples, (num_images, side * side + 1) uint8, in their fixed order.

        Raises:
            DataUnavailableError: the images are neither cached, nor installed, nor available by apt.
            RuntimeError: a file is damaged or not the known one.
        """
        path = cache / f"{self.name}-1.npy"
        samples = cached_array(path, lambda: self.prepare(cache))
        expected = (self.num_images, self.side**2 + 1)
        if samples.shape != expected or samples.dtype != np.uint8:
            raise RuntimeError(
                f"{path} holds {samples.dtype} {samples.shape}, expected uint8 {expected}; delete it and try again"
            )
        return samples


def open_images(data: str, cache: Path) -> tuple[Array, str]:
    """Returns samples and the name of their set: Fashion-MNIST, or the digits that stand in for it, as `data` says.

    Raises:
        DataUnavailableError: `data` is `fashion-mnist`, and Fashion-MNIST is not available.
    """
    return real_or_stand_in(
        data,
        FASHION.name,
        lambda: FASHION.load(cache),
        DIGITS.name,
        lambda: DIGITS.load(cache),
        remark="images are scikit-learn's digits, which are few and easier",
    )


def _prepare_fashion(cache: Path) -> Array:
    start_s = time.perf_counter()
    directory = fetch_debian(PACKAGE, cache)
    images, labels = (
        np.concatenate([_read_idx(directory, name, sha256) for name, sha256 in files.items()])
        for files in (IMAGES, LABELS)
    )
    logger.info("prepared %d images in %.1f s", len(images), time.perf_counter() - start_s)
    return _samples(images, labels)


def _read_idx(directory: Path, name: str, sha256: str) -> Array:
    """Returns the array of a file in MNIST's format: type, number of axes, their lengths (big-endian), then the
    elements.
    """
    content = gunzipped(directory / name, PACKAGE, directory)
    if (got := hashlib.sha256(content).hexdigest()) != sha256:
        raise RuntimeError(
            f"{directory / name} is not the known file: SHA-256 of its content is {got}, expected {sha256}; "
            f"delete {directory} or install {PACKAGE.package} again"
        )
    num_axes = content[3]
    shape = np.frombuffer(content, ">i4", num_axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def _prepare_digits(cache: Path) -> Array:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(digits.target))
    return _samples(digits.images[order], digits.target[order])


def _samples(images: Array, labels: Array) -> Array:
    return np.column_stack([images.reshape(len(images), -1), labels]).astype(np.uint8)


FASHION = ImageSet(
    name="fashion-mnist",
    title="images of clothing (Fashion-MNIST)",
    num_images=70_000,
    side=28,
    mean=73.0,
    deviation=90.0,
    prepare=_prepare_fashion,
)
DIGITS = ImageSet(
    name="digits",
    title="handwritten digits (scikit-learn)",
    num_images=1_797,
    side=8,
    mean=4.9,
    deviation=6.0,
    prepare=_prepare_digits,
)
IMAGE_SETS = {images.name: images for images in (FASHION, DIGITS)}
