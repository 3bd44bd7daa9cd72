"""Images come from a Debian package, verified byte for byte, with its test images held out; else they are digits."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from gradsync_lab.workloads import ResNet8, data, images, load
from lab.tests.workloads.training import opened, opened_or_skip

NOWHERE = dataclasses.replace(images.PACKAGE, path=Path("/nowhere/usr/share/datasets/fashion-mnist"))
SMALL = dataclasses.replace(images.FASHION, num_images=7, side=3)


def idx(array: data.Array) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty cache directory, without network and package."""
    monkeypatch.setattr(images, "PACKAGE", NOWHERE)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def packaged(nowhere: Path) -> data.Array:
    """Returns seven images and labels, five of them for training, as they are to be loaded from the package's four
    files.
    """
    samples = np.random.default_rng(0).integers(0, 256, size=(7, 10), dtype=np.uint8)
    directory = nowhere / "fashion-mnist"
    directory.mkdir()
    parts = (samples[:5, :9].reshape(5, 3, 3), samples[5:, :9].reshape(2, 3, 3), samples[:5, 9], samples[5:, 9])
    for name, part in zip((*images.IMAGES, *images.LABELS), parts, strict=True):
        (directory / name).write_bytes(gzip.compress(idx(part)))
    return samples


def know_the_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (images.IMAGES, images.LABELS):
        for name in known:
            content = gzip.decompress((directory / name).read_bytes())
            monkeypatch.setitem(known, name, hashlib.sha256(content).hexdigest())


def test_the_packages_images_come_with_their_labels_and_its_test_images_last(
    nowhere: Path, packaged: data.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_the_files(nowhere / "fashion-mnist", monkeypatch)
    samples = SMALL.load(nowhere)
    assert np.array_equal(samples, packaged)
    assert isinstance(samples, np.memmap)
    with pytest.raises(RuntimeError, match=r"holds uint8 \(7, 10\), expected uint8 \(70000, 785\); delete it"):
        images.FASHION.load(nowhere)


@pytest.mark.usefixtures("packaged")
def test_files_with_other_content_are_refused(nowhere: Path) -> None:
    with pytest.raises(RuntimeError, match="train-images.* is not the known file: .* expected c59f468a.*; delete"):
        images.FASHION.load(nowhere)
    assert not (nowhere / "fashion-mnist-1.npy").exists()


@pytest.mark.usefixtures("packaged")
@pytest.mark.parametrize("keep", [0, 5, -4, None])
def test_a_damaged_or_missing_file_is_named(nowhere: Path, keep: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    know_the_files(nowhere / "fashion-mnist", monkeypatch)
    path = nowhere / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz"
    content = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(content[:keep])
    with pytest.raises(RuntimeError, match=r"t10k-labels.*gz (cannot be read .*; delete .*/fashion-mnist or|is not)"):
        SMALL.load(nowhere)


def test_without_apt_the_error_says_what_to_do(nowhere: Path) -> None:
    with pytest.raises(
        data.DataUnavailableError, match=f"no apt-get.*put its fashion-mnist at {nowhere}/fashion-mnist"
    ):
        load("resnet8", cache_dir=nowhere)


def test_a_fallback_to_digits_is_logged_and_named(nowhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    workload = opened(ResNet8, data="any", cache_dir=nowhere)
    assert (workload.source, workload.num_train, workload.num_samples) == ("digits", 1_540, 1_797)
    assert "scikit-learn" in workload.describe()
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "no fashion-mnist; images are scikit-learn's digits" in warning.message


def test_all_real_images_are_there_and_brought_to_mean_0_and_deviation_1() -> None:
    workload = opened_or_skip(ResNet8)
    assert (workload.source, workload.num_train, workload.num_samples) == ("fashion-mnist", 60_000, 70_000)
    held_out = np.arange(60_000, 70_000)
    pixels, labels = workload.batch(held_out)
    assert labels.bincount().tolist() == [1_000] * 10
    assert workload.batch(np.arange(60_000))[1].bincount().tolist() == [6_000] * 10
    assert pixels.shape == (10_000, 1, 28, 28)
    assert pixels.dtype == torch.float32
    assert float(pixels.mean()) == pytest.approx(0, abs=0.01)
    assert float(pixels.std()) == pytest.approx(1, abs=0.01)
    assert torch.equal(
        (pixels[3, 0] * 90 + 73).round().byte().flatten(), torch.tensor(workload._opened[0][60_003, :-1])
    )
