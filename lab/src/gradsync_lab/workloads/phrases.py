"""German and English text, 74 thousand pairs: phrases of a dictionary and paragraphs of a program's help.

The phrases are those of Ding, the German-English dictionary of F. Richter (TU Chemnitz; GPL-2+), as in Debian's
trans-de-en; the paragraphs are LibreOffice's help (MPL-2.0), which has the same file and element ids in both languages.
Words are lower-case runs of letters and digits, and single punctuation marks; pairs of 4 to 60 words on both sides are
kept, each once, in a fixed random order.
"""

from __future__ import annotations

import html
import logging
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np

from .data import Array, DebianFile, cached_array, check_counts, fetch_debian, real_or_zipf, zipf_ranks

logger = logging.getLogger(__name__)

DICTIONARY = DebianFile(package="trans-de-en", path=Path("/usr/share/trans/de-en"), kept_as="ding-de-en")
HELP = tuple(
    DebianFile(
        package=f"libreoffice-help-{language.lower()}",
        path=Path("/usr/share/libreoffice/help", language),
        kept_as=f"libreoffice-help-{language.lower()}",
    )
    for language in ("de", "en-US")
)
# Counts of trans-de-en 1.9 and LibreOffice 7.4.7. Other builds are used with a warning if they differ by at most 1 %.
COUNTS = {"phrases": 391_702, "paragraphs": 35_488, "pairs": 74_399, "german": 52_848, "english": 29_658}
TOLERANCE = 0.01
SHUFFLE_SEED = 0
MIN_WORDS, MAX_WORDS = 4, 60  # on each side of a pair

REMARK = re.compile(r"\{[^}]*\}|\[[^\]]*\]|<[^>]*>|\([^)]*\)")  # grammar, field, usage
PARAGRAPH = re.compile(r'<(p|h\d)\s[^>]*?id="((?:par|hd|bm)_[^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")
WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")

ZIPF_EXPONENTS = (1.20, 1.35)  # of the German and the English word frequencies, fitted
ZIPF_PAIRS = 1 << 14
ZIPF_MEAN_EXTRA = 7.0  # mean number of words of a side beyond MIN_WORDS, as in the real pairs

Pair = tuple[str, str]


def open_pairs(data: str, cache: Path) -> tuple[Array, str]:
    """Returns pairs and the name of their source: real ones, or the generated stand-in `zipf`, as `data` says.

    Pairs are (n, 2, 60) uint16: German, then English words as ranks in order of frequency in their language, the most
    frequent 1, padded with 0.

    Raises:
        DataUnavailableError: `data` is `ding`, and a package is not available.
    """
    return real_or_zipf(data, "ding", lambda: load_pairs(cache), zipf_pairs, what="pairs", known=COUNTS["pairs"])


def load_pairs(cache: Path) -> Array:
    """Returns the pairs of German and English text, (n, 2, 60) uint16 word ranks, in a fixed random order.

    Raises:
        DataUnavailableError: the pairs are neither cached, nor installed, nor available by apt.
        RuntimeError: a text is damaged, or so different from the known one that results would not compare.
    """
    path = cache / "phrases-1.npy"
    pairs = cached_array(path, lambda: _prepare(*(fetch_debian(file, cache) for file in (DICTIONARY, *HELP))))
    if pairs.shape[1:] != (2, MAX_WORDS) or pairs.dtype != np.uint16:
        raise RuntimeError(
            f"{path} holds {pairs.dtype} {pairs.shape}, expected uint16 (pairs, 2, {MAX_WORDS}); "
            "delete it and try again"
        )
    return pairs


def zipf_pairs(seed: int = 0) -> Array:
    """Returns seeded pairs for tests without the real texts: independent words by Zipf laws, (16384, 2, 60) uint16."""
    rng = np.random.default_rng(seed)
    extra = rng.geometric(1 / (1 + ZIPF_MEAN_EXTRA), size=(ZIPF_PAIRS, 2, 1)) - 1
    sides = [
        zipf_ranks(rng, (ZIPF_PAIRS, MAX_WORDS), COUNTS[language], exponent) + 1
        for language, exponent in zip(("german", "english"), ZIPF_EXPONENTS, strict=True)
    ]
    inside = np.arange(MAX_WORDS) < MIN_WORDS + extra
    return np.where(inside, np.stack(sides, axis=1), 0).astype(np.uint16)


def _prepare(dictionary: Path, german_help: Path, english_help: Path) -> Array:
    start_s = time.perf_counter()
    phrases = _phrases(dictionary)
    paragraphs = _paragraphs(german_help, english_help)
    cut = [(WORD.findall(german.lower()), WORD.findall(english.lower())) for german, english in phrases + paragraphs]
    kept = [pair for pair in cut if all(MIN_WORDS <= len(side) <= MAX_WORDS for side in pair)]
    pairs = list({(" ".join(german), " ".join(english)): (german, english) for german, english in kept}.values())
    shuffled = [pairs[index] for index in np.random.default_rng(SHUFFLE_SEED).permutation(len(pairs))]
    sides = [_ranks([pair[side] for pair in shuffled]) for side in (0, 1)]
    german_types, english_types = (int(side.max(initial=0)) for side in sides)
    got = {"phrases": len(phrases), "paragraphs": len(paragraphs), "pairs": len(pairs)}
    check_counts({**got, "german": german_types, "english": english_types}, COUNTS, TOLERANCE, dictionary)
    logger.info("prepared %d pairs in %.1f s", len(pairs), time.perf_counter() - start_s)
    return np.stack(sides, axis=1)


def _phrases(path: Path) -> list[Pair]:
    """Returns the dictionary's pairs of phrases, one for each sense in a line; of synonyms the first is taken."""

    def first_synonym(text: str) -> str:
        return " ".join(REMARK.sub(" ", text).split()).split(";")[0].strip()

    pairs = []
    for line in path.read_text(encoding="utf8", errors="replace").splitlines():
        german, separator, english = line.partition(" :: ")
        if not separator or line.startswith("#") or german.count("|") != english.count("|"):
            continue
        senses = zip(german.split("|"), english.split("|"), strict=True)
        pairs += [(first_synonym(one), first_synonym(other)) for one, other in senses]
    return [pair for pair in pairs if all(pair)]


def _paragraphs(german_help: Path, english_help: Path) -> list[Pair]:
    """Returns paragraphs of LibreOffice's help as (German, English), where both exist and differ, once each, sorted."""
    german, english = _paragraphs_by_id(german_help), _paragraphs_by_id(english_help)
    pairs = {(german[place], english[place]) for place in german.keys() & english.keys()}
    return sorted((one, other) for one, other in pairs if one and other and one != other)


def _paragraphs_by_id(directory: Path) -> dict[tuple[str, str], str]:
    """Returns the text of each paragraph of LibreOffice's help in one language, by (file, id of the HTML element)."""
    texts = {}
    for path in directory.rglob("*.html"):
        for _, place, content in PARAGRAPH.findall(path.read_text(encoding="utf8", errors="replace")):
            text = " ".join(html.unescape(TAG.sub(" ", content)).split())
            texts[path.relative_to(directory).as_posix(), place] = text
    return texts


def _ranks(sentences: list[list[str]]) -> Array:
    """Maps words to ranks 1, 2, ... by frequency, (n, 60) uint16; the word that appears first wins a tie."""
    counts = Counter(word for sentence in sentences for word in sentence)
    rank = {word: index for index, (word, _) in enumerate(counts.most_common(), 1)}
    table = np.zeros((len(sentences), MAX_WORDS), dtype=np.uint16)
    for row, sentence in zip(table, sentences, strict=True):
        row[: len(sentence)] = [rank[word] for word in sentence]
    return table
