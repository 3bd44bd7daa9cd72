"""Entries have their label found and removed from the text, and words cut into pieces; a missing tool is reported."""

from __future__ import annotations

import gzip
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from gradsync_lab.workloads import data, entries, gcide, load

TEXT = """
Abandon \\A*ban"don\\, v. t. [imp. & p. p. {Abandoned}.]
   To give up absolutely, v. t. or v. i. of old.
   [1913 Webster]
Able \\A"ble\\ ([=a]"b'l), a. [OF.]
   Having sufficient power, skill, or means.
Ably \\A"bly\\, adv.
   In an able manner and with great ability.
Abyss \\A*byss"\\, n.
   A bottomless depth.
Acorn \\A"corn\\, n.
   The fruit of the oak, growing in a cup.
Acre
   A field without a label, and quite a few words.
"""
COUNTS = {"n": 1, "a": 1, "v": 1, "adv": 1}


@pytest.fixture
def text_in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    nowhere = data.DebianFile(package="dict-gcide", path=Path("/nowhere/usr/share/dictd/gcide.dict.dz"))
    monkeypatch.setattr(gcide, "FILE", nowhere)
    monkeypatch.setattr(entries, "COUNTS", COUNTS)
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(TEXT.encode()))
    return tmp_path


def test_labels_are_found_and_left_out_of_the_text_and_short_entries_are_dropped(text_in_cache: Path) -> None:
    samples = entries._samples(text_in_cache / "gcide.dict.dz")
    assert [label for label, _ in samples] == ["v", "a", "adv", "n"]
    assert " ".join(samples[0][1]) == "to give up absolutely , . . or . . of old ."
    assert " ".join(samples[2][1]) == "in an able manner and with great ability ."


def test_pieces_spell_the_words_and_a_preparation_repeats(text_in_cache: Path) -> None:
    pytest.importorskip("tokenizers")
    words = [words for _, words in entries._samples(text_in_cache / "gcide.dict.dz")]
    pieces, again = (entries._pieces(words) for _ in range(2))
    assert pieces == again
    assert pieces.keys() == {word for text in words for word in text}
    ids = [piece for word in pieces.values() for piece in word]
    assert min(ids) > entries.CLASS
    assert max(ids) < entries.VOCABULARY
    assert len({tuple(word) for word in pieces.values()}) == len(pieces)  # no two words are spelt alike


def test_text_becomes_a_table_of_labels_and_pieces(text_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_pieces", lambda texts: {word: [len(word) + 10] for text in texts for word in text})
    table, source = entries.open_entries("gcide", text_in_cache)
    assert source == "gcide"
    assert table.shape == (4, 65)
    adverb = next(row for row in np.asarray(table) if row[0] == entries.LABELS.index("adv"))
    expected = [len(word) + 10 for word in "in an able manner and with great ability .".split()]
    assert adverb[1:].tolist() == [entries.CLASS, *expected, *[0] * (64 - 1 - len(expected))]


def test_a_long_entry_is_cut_off(text_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_pieces", lambda texts: {word: [7] * 40 for text in texts for word in text})
    table = np.asarray(entries.load_entries(text_in_cache))
    assert (table[:, 1:] == [entries.CLASS, *[7] * 63]).all()


def test_without_tokenizers_the_error_says_what_to_install(
    text_in_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(data.DataUnavailableError, match="needs tokenizers.* pip install './lab.bert.'"):
        load("bert", cache_dir=text_in_cache)
    assert not (text_in_cache / "gcide-pieces-1.npy").exists()


def test_a_fallback_to_generated_entries_is_logged_and_named(
    text_in_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    workload = load("bert", data="any", cache_dir=text_in_cache)
    assert workload.source == "zipf"
    assert [record.levelno for record in caplog.records if "NOT real data" in record.message] == [logging.WARNING]


def test_another_text_is_refused(text_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "COUNTS", {**COUNTS, "n": 2})
    with pytest.raises(RuntimeError, match="is not the expected text: got .*'n': 1"):
        entries.load_entries(text_in_cache)


def test_a_cached_array_of_another_kind_is_refused(tmp_path: Path) -> None:
    data.cached_array(tmp_path / "gcide-pieces-1.npy", lambda: np.zeros((2, 2)))
    with pytest.raises(RuntimeError, match=r"holds float64 .2, 2., expected uint16 .entries, 65.; delete it"):
        entries.load_entries(tmp_path)


def test_generated_entries_follow_the_stated_law_and_the_classes_of_the_dictionary() -> None:
    table = entries.zipf_entries()
    pieces = table[:, 2:]
    counts = np.bincount(pieces[pieces > 0])[len(entries.SIGNS) :][:1000]
    slope = np.polyfit(np.log(np.arange(1, 1001)), np.log(counts), 1, w=np.sqrt(counts))[0]
    assert slope == pytest.approx(-1.14, abs=0.02)
    share = np.array(list(entries.COUNTS.values())) / sum(entries.COUNTS.values())
    assert np.bincount(table[:, 0]) / len(table) == pytest.approx(share, abs=1e-3)
    assert (table[:, 1:] != entries.PADDING).sum(axis=1).mean() == pytest.approx(33, abs=0.5)
