"""Pairs are fetched from Debian packages, aligned, cut into words and counted; missing packages are reported."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from gradsync_lab.workloads import data, load, phrases

DICTIONARY = """# a remark :: not a pair
Haus {n} | ein altes Haus am See; eine Hütte :: house | an old house [poet.] at the lake; a hut
drei Katzen und ein Hund | zwei :: three cats and a dog
das Haus <Haus> am alten See! :: the house (by) the old lake!
kein Paar
"""
HELP_DE = """<p id="par_id1" class="paragraph">Öffnet das <b>alte</b> Haus &amp; den See.</p>
<h2 id="hd_id2">Calc 1 2 3</h2> <p id="par_id3" class="x">Nur auf Deutsch da.</p>"""
HELP_EN = """<p id="par_id1" class="paragraph">Opens the <b>old</b> house &amp; the lake.</p>
<h2 id="hd_id2">Calc 1 2 3</h2>"""
PAIRS = {
    ("ein altes haus am see", "an old house at the lake"),
    ("das haus am alten see !", "the house the old lake !"),
    ("öffnet das alte haus & den see .", "opens the old house & the lake ."),
}
COUNTS = {"phrases": 3, "paragraphs": 1, "pairs": 3, "german": 13, "english": 10}


def nowhere(file: data.DebianFile) -> data.DebianFile:
    return data.DebianFile(file.package, Path("/nowhere") / file.path.relative_to("/"), file.kept_as)


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases, "DICTIONARY", nowhere(phrases.DICTIONARY))
    monkeypatch.setattr(phrases, "HELP", tuple(nowhere(file) for file in phrases.HELP))


@pytest.fixture
def texts_in_cache(tmp_path: Path, no_packages: None) -> Path:
    (tmp_path / "ding-de-en").write_text(DICTIONARY, encoding="utf8")
    for language, content in (("de", HELP_DE), ("en-us", HELP_EN)):
        page = tmp_path / f"libreoffice-help-{language}" / "text" / "page.html"
        page.parent.mkdir(parents=True)
        page.write_text(content, encoding="utf8")
    return tmp_path


def test_texts_become_aligned_pairs_of_ranks(texts_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases, "COUNTS", COUNTS)
    pairs, source = phrases.open_pairs("ding", texts_in_cache)
    assert source == "ding"
    assert pairs.shape == (3, 2, 60)
    ranks = {tuple((pair > 0).sum(axis=1).tolist()): pair for pair in np.asarray(pairs)}
    words = {tuple(len(side.split()) for side in pair): pair for pair in PAIRS}  # all lengths differ
    assert ranks.keys() == words.keys()
    for side, most_frequent in ((0, {"haus"}), (1, {"the"})):
        places = [
            place
            for lengths in words
            for place in zip(words[lengths][side].split(), ranks[lengths][side][: lengths[side]], strict=True)
        ]
        assert len(set(places)) == len({word for word, _ in places}) == len({rank for _, rank in places})
        assert {word for word, rank in places if rank == 1} <= most_frequent | {"see"}


def test_the_cache_is_enough_afterwards(texts_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases, "COUNTS", COUNTS)
    first = np.array(phrases.load_pairs(texts_in_cache))
    (texts_in_cache / "ding-de-en").unlink()
    monkeypatch.setenv("PATH", "")
    assert np.array_equal(phrases.load_pairs(texts_in_cache), first)


def test_without_apt_the_error_says_what_to_do(
    tmp_path: Path, no_packages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        data.DataUnavailableError, match="no apt-get.*'apt-get install trans-de-en'.*its de-en at .*/ding"
    ):
        load("nmt", cache_dir=tmp_path)


def test_help_that_is_missing_is_named(texts_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (texts_in_cache / "libreoffice-help-en-us").rename(texts_in_cache / "elsewhere")
    with pytest.raises(data.DataUnavailableError, match="libreoffice-help-en-us is not installed.*put its en-US at "):
        phrases.load_pairs(texts_in_cache)


def test_a_fallback_to_generated_pairs_is_logged_and_named(
    tmp_path: Path, no_packages: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    workload = load("nmt", data="any", cache_dir=tmp_path)
    assert workload.source == "zipf"
    assert [record.levelno for record in caplog.records if "NOT real data" in record.message] == [logging.WARNING]


def test_other_texts_are_refused(texts_in_cache: Path) -> None:
    with pytest.raises(RuntimeError, match="is not the expected text: got .*'pairs': 3"):
        phrases.load_pairs(texts_in_cache)
    assert not (texts_in_cache / "phrases-1.npy").exists()


def test_another_build_of_the_texts_has_a_name_of_its_own(
    texts_in_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(phrases, "COUNTS", {**COUNTS, "pairs": 4})
    monkeypatch.setattr(phrases, "TOLERANCE", 0.3)
    assert phrases.open_pairs("ding", texts_in_cache)[1] == "ding (3 pairs)"
    assert "another build" in caplog.text


def test_a_cached_array_of_another_kind_is_refused(tmp_path: Path) -> None:
    data.cached_array(tmp_path / "phrases-1.npy", lambda: np.zeros((2, 2)))
    with pytest.raises(RuntimeError, match=r"holds float64 .2, 2., expected uint16 .pairs, 2, 60.; delete it"):
        phrases.load_pairs(tmp_path)


def test_generated_pairs_follow_the_stated_laws() -> None:
    pairs = phrases.zipf_pairs()
    assert (pairs > 0).sum(axis=2).min() == 4
    assert (pairs > 0).sum(axis=2).mean() == pytest.approx(11, abs=0.2)
    for side, exponent in enumerate(phrases.ZIPF_EXPONENTS):
        counts = np.bincount(pairs[:, side].ravel())[1:301]
        slope = np.polyfit(np.log(np.arange(1, 301)), np.log(counts), 1, w=np.sqrt(counts))[0]
        assert slope == pytest.approx(-exponent, abs=0.02)
