"""English prose, 6.3 million words: the definitions and quotations of a dictionary, in random order of entries.

The data are the GNU version of the Collaborative International Dictionary of English (GPL-2+) as Debian packages it.
Words are lower-case runs of letters, numbers, and punctuation marks; etymologies and pronunciations are left out.
Entries are shuffled before they are joined, as the sentences of the One Billion Word benchmark are (Chelba et al.,
2013): in dictionary order, neighbouring entries are about the same few words.
"""

from __future__ import annotations

import logging
import re
import time
from array import array
from collections import defaultdict
from itertools import count
from pathlib import Path

import numpy as np

from .data import Array, DebianFile, cached_array, check_counts, fetch_debian, gunzipped, real_or_zipf, zipf_ranks

logger = logging.getLogger(__name__)

FILE = DebianFile(package="dict-gcide", path=Path("/usr/share/dictd/gcide.dict.dz"))
# Counts of version 0.48.5. Other builds of the text are used with a warning if they differ by at most 1 %.
COUNTS = {"entries": 127_968, "words": 6_294_698, "types": 216_493}
TOLERANCE = 0.01
SHUFFLE_SEED = 0

LEFT_OUT = re.compile(r"\[[^\]]{0,40}\]|\\[^\\\n]*\\|[{}]")  # short etymologies and sources, pronunciation, link marks
WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*|[0-9]+|[.,;:?!]")

ZIPF_EXPONENT = 1.12  # of the dictionary's word frequencies, fitted
ZIPF_WORDS = 1 << 19


def open_words(data: str, cache: Path) -> tuple[Array, str]:
    """Returns words and the name of their source: the dictionary, or the generated stand-in `zipf`, as `data` says.

    Words are (n,) int32 ranks in order of frequency, the most frequent 1; 0 is free for words that a vocabulary lacks.

    Raises:
        DataUnavailableError: `data` is `gcide`, and the dictionary is not available.
    """
    return real_or_zipf(data, "gcide", lambda: load_gcide(cache), zipf_words, what="words", known=COUNTS["words"])


def load_gcide(cache: Path) -> Array:
    """Returns the dictionary's words as ranks, (n,) int32, in the fixed random order of entries.

    Raises:
        DataUnavailableError: the dictionary is neither cached, nor installed, nor available by apt.
        RuntimeError: the text is damaged, or so different from the known one that results would not compare.
    """
    path = cache / "gcide-1.npy"
    words = cached_array(path, lambda: _prepare(fetch_debian(FILE, cache)))
    if words.ndim != 1 or words.dtype != np.int32:
        raise RuntimeError(
            f"{path} holds {words.dtype} {words.shape}, expected int32 of one axis; delete it and try again"
        )
    return words


def zipf_words(seed: int = 0) -> Array:
    """Returns seeded words for tests without the dictionary: independent ranks, (524288,) int32, by a Zipf law."""
    ranks = zipf_ranks(np.random.default_rng(seed), ZIPF_WORDS, COUNTS["types"], ZIPF_EXPONENT)
    return np.asarray(ranks + 1, dtype=np.int32)


def _prepare(path: Path) -> Array:
    start_s = time.perf_counter()
    entries = read_entries(path)
    number: defaultdict[str, int] = defaultdict(count().__next__)  # of each type, in order of appearance
    words = array("i")
    for index in np.random.default_rng(SHUFFLE_SEED).permutation(len(entries)):
        text = LEFT_OUT.sub(" ", entries[index]).lower()
        words.extend([number[word] for word in WORD.findall(text)])
    got = {"entries": len(entries), "words": len(words), "types": len(number)}
    check_counts(got, COUNTS, TOLERANCE, path)
    ranks = _ranks(np.frombuffer(words, dtype=np.int32))
    logger.info("prepared %d words of %d types in %.1f s", len(words), len(number), time.perf_counter() - start_s)
    return ranks


def read_entries(path: Path) -> list[str]:
    """Returns the entries' text, each from its head word to the next; the preface, which differs by build, is cut."""
    text = gunzipped(path, FILE, path).decode("utf8", "replace")  # dictzip is gzip with an index in its header
    entries = re.split(r"\n(?=\S)", text)
    first = next((index for index, entry in enumerate(entries) if "\\" in entry), len(entries))  # a pronunciation
    return entries[first:]


def _ranks(numbers: Array) -> Array:
    """Maps words, numbered by first appearance, to ranks 1, 2, ... by frequency; of a tie, the first word wins."""
    by_frequency = np.argsort(-np.bincount(numbers), kind="stable")
    rank = np.empty(len(by_frequency), dtype=np.int32)
    rank[by_frequency] = np.arange(1, len(by_frequency) + 1)
    return np.asarray(rank[numbers])
