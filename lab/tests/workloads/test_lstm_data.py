"""The dictionary is fetched from a Debian package, cut into words and counted; a missing package is reported."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gradsync_lab.workloads import data, gcide, load

TEXT = """
00-database-info
   converted on some day
and distributed so.

A \\A\\ (named [=a] in English).
   The first letter; the Letter. {Alpha}

B \\B\\ is the second letter, letter 2, mother-in-law's. [Webster]
C \\C\\ a letter.
"""
WORDS = """a named in english . the first letter ; the letter . alpha
b is the second letter , letter 2 , mother-in-law's . c a letter .""".split()
NOWHERE = data.DebianFile(package="dict-gcide", path=Path("/nowhere/usr/share/dictd/gcide.dict.dz"))


@pytest.fixture
def text_in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gcide, "FILE", NOWHERE)
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(TEXT.encode()))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (data.DebianFile("example", Path("/usr/share/gradsync-example/words.dz")), "words.dz"),
        (data.DebianFile("example", Path("/usr/share/gradsync-example"), kept_as="examples"), "examples/words.dz"),
    ],
    ids=["file", "directory"],
)
def test_a_package_is_downloaded_and_unpacked_once(
    file: data.DebianFile, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb to build a package")
    tree = tmp_path / "tree"
    packed = {"DEBIAN/control": CONTROL, "usr/share/gradsync-example/words.dz": "words"}
    for path, content in packed.items():
        (tree / path).parent.mkdir(parents=True)
        (tree / path).write_text(content)
    subprocess.run(["dpkg-deb", "--build", str(tree), str(tmp_path / "example.deb")], check=True, capture_output=True)
    fake = tmp_path / "bin" / "apt-get"  # delivers once, as apt does: into the working directory
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\nmv {tmp_path / 'example.deb'} .\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    cache = tmp_path / "cache"
    paths = [data.fetch_debian(file, cache) for _ in range(2)]
    assert paths == [cache / file.filename] * 2
    assert (cache / words).read_text() == "words"
    assert {path.name for path in cache.iterdir()} == {file.filename, f"{file.filename}.lock"}


CONTROL = """Package: example
Version: 1
Architecture: all
Maintainer: nobody <nobody@example.org>
Description: words
"""


def test_an_installed_package_is_used_in_place(tmp_path: Path) -> None:
    installed = tmp_path / "words.dz"
    installed.write_text("words")
    assert data.fetch_debian(data.DebianFile("example", installed), tmp_path / "cache") == installed
    assert not (tmp_path / "cache").exists()


def test_without_apt_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcide, "FILE", NOWHERE)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(data.DataUnavailableError, match="no apt-get.*'apt-get install dict-gcide'.*put its gcide.dict"):
        load("lstm", cache_dir=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_apts_own_reason_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "apt-get"
    fake.write_text("#!/bin/sh\necho 'E: Unable to locate package dict-gcide' >&2\nexit 100\n")
    fake.chmod(0o755)
    monkeypatch.setattr(gcide, "FILE", NOWHERE)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(data.DataUnavailableError, match="E: Unable to locate package dict-gcide. Connect"):
        load("lstm", cache_dir=tmp_path)


def test_a_fallback_to_generated_words_is_logged_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcide, "FILE", NOWHERE)
    monkeypatch.setenv("PATH", str(tmp_path))
    workload = load("lstm", data="any", cache_dir=tmp_path)
    assert workload.source == "zipf"
    assert [record.levelno for record in caplog.records if "NOT real data" in record.message] == [logging.WARNING]


def test_text_becomes_words_in_shuffled_entries(text_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"entries": 3, "words": len(WORDS), "types": len(set(WORDS))}
    monkeypatch.setattr(gcide, "COUNTS", counts)
    ranks = gcide.load_gcide(text_in_cache)
    entries = [WORDS[:13], WORDS[13:24], WORDS[24:]]
    shuffled = [entries[index] for index in np.random.default_rng(gcide.SHUFFLE_SEED).permutation(3)]
    words = [word for entry in shuffled for word in entry]
    assert len(set(zip(words, ranks.tolist(), strict=True))) == len(set(words)) == len(set(ranks.tolist()))
    assert ranks.min() == 1
    assert {word for word, rank in zip(words, ranks, strict=True) if rank == 1} == {"letter"}


def test_another_text_is_refused(text_in_cache: Path) -> None:
    with pytest.raises(RuntimeError, match="is not the expected text: got .*'entries': 3"):
        gcide.load_gcide(text_in_cache)
    assert not (text_in_cache / "gcide-1.npy").exists()


def test_another_build_of_the_text_is_used_with_a_warning_and_a_name_of_its_own(
    text_in_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcide, "COUNTS", {"entries": 3, "words": len(WORDS) + 1, "types": len(set(WORDS))})
    monkeypatch.setattr(gcide, "TOLERANCE", 0.1)
    _, source = gcide.open_words("gcide", text_in_cache)
    assert source == f"gcide ({len(WORDS)} words)"
    assert "another build" in caplog.text


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_damaged_text_is_named(text_in_cache: Path, keep: int) -> None:
    path = text_in_cache / "gcide.dict.dz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RuntimeError, match=r"gcide\.dict\.dz (cannot be read|is not the expected text)"):
        gcide.load_gcide(text_in_cache)


def test_a_cached_array_of_another_kind_is_refused(tmp_path: Path) -> None:
    data.cached_array(tmp_path / "gcide-1.npy", lambda: np.zeros((2, 2)))
    with pytest.raises(RuntimeError, match="holds float64 .2, 2., expected int32 of one axis; delete it"):
        gcide.load_gcide(tmp_path)


def test_generated_words_follow_the_stated_zipf_law() -> None:
    counts = np.bincount(gcide.zipf_words())[1:1001]
    slope = np.polyfit(np.log(np.arange(1, 1001)), np.log(counts), 1, w=np.sqrt(counts))[0]
    assert slope == pytest.approx(-1.12, abs=0.02)
