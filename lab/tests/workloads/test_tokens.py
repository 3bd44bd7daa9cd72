"""The dictionary's tokens spell its text, a preparation is repeatable, and a missing tool is reported."""

from __future__ import annotations

import gzip
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from gradsync_lab.workloads import data, gcide, load, tokens

TEXT = """
Abandon \\A*ban"don\\, v. t. [imp. & p. p. {Abandoned}.]
   To give up absolutely, in 1913.
Able \\A"ble\\ ([=a]"b'l), a. [OF.]
   Having sufficient power; caf\u00e9.
"""
SPELT = {"Abandon , v. t. To give up absolutely, in 1913.", "Able ( \"b'l), a. Having sufficient power; caf\u00e9."}


@pytest.fixture
def text_in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    nowhere = data.DebianFile(package="dict-gcide", path=Path("/nowhere/usr/share/dictd/gcide.dict.dz"))
    monkeypatch.setattr(gcide, "FILE", nowhere)
    monkeypatch.setattr(tokens, "TOLERANCE", 1e9)
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(TEXT.encode()))
    return tmp_path


def test_tokens_spell_the_entries_and_a_preparation_repeats(
    text_in_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    spelling: dict[int, str] = {tokens.SEPARATOR: "\n"}
    cut = tokens.encoded

    def noting(tokenizer, texts):
        spelling.update({i: tokenizer.id_to_token(i) for i in range(1, tokenizer.get_vocab_size())})
        return cut(tokenizer, texts)

    monkeypatch.setattr(tokens, "encoded", noting)
    found = np.asarray(tokens.load_tokens(text_in_cache))
    again = tokens._prepare(text_in_cache / "gcide.dict.dz")
    assert np.array_equal(found, again)
    spelt = "".join(spelling[token] for token in found)
    # Byte-level tokens write a space as one letter, and bytes beyond ASCII as other letters.
    assert set(spelt.replace("\u0120", " ").replace("\u00c3\u00a9", "\u00e9").split("\n")) == {*SPELT, ""}


def test_without_tokenizers_the_error_says_what_to_install(
    text_in_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(data.DataUnavailableError, match="needs tokenizers.* pip install './lab.bert.'"):
        load("gpt", cache_dir=text_in_cache)
    assert not (text_in_cache / "gcide-tokens-1.npy").exists()
    assert load("gpt", data="any", cache_dir=text_in_cache).source == "zipf"
    assert [record.levelno for record in caplog.records if "NOT real data" in record.message] == [logging.WARNING]


def test_another_text_is_refused(text_in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokens, "TOLERANCE", 0.01)
    with pytest.raises(RuntimeError, match="is not the expected text: got .*'entries': 2"):
        tokens.load_tokens(text_in_cache)


def test_a_cached_array_of_another_kind_is_refused(tmp_path: Path) -> None:
    data.cached_array(tmp_path / "gcide-tokens-1.npy", lambda: np.zeros((2, 2)))
    with pytest.raises(RuntimeError, match=r"holds float64 .2, 2., expected uint16 of one axis; delete it"):
        tokens.load_tokens(tmp_path)


def test_generated_tokens_follow_the_stated_law() -> None:
    counts = np.bincount(tokens.zipf_tokens())[:1000]
    slope = np.polyfit(np.log(np.arange(1, 1001)), np.log(counts), 1, w=np.sqrt(counts))[0]
    assert slope == pytest.approx(-0.96, abs=0.02)
