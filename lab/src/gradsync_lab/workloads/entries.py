"""The entries of a dictionary, 98 thousand, each as pieces of words with its part of speech as label.

The entries are GCIDE's (see `gcide`); the label is the abbreviation after the head word: noun, adjective, verb or
adverb. The text is the rest of the entry without such abbreviations, which would give the label away.

Words are cut into WordPieces (Schuster & Nakajima, 2012; Devlin et al., 2019) of a vocabulary of 30,522, BERT's size,
trained on the text by `tokenizers`. BERT's own vocabulary comes with 84 MB of weights; this one needs no further
download.
"""

from __future__ import annotations

import logging
import re
import string
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np

from . import gcide
from .data import Array, cached_array, check_counts, fetch_debian, real_or_zipf, zipf_ranks
from .pieces import encoded, tokenizers

logger = logging.getLogger(__name__)

LABELS = ("n", "a", "v", "adv")  # classes 0 to 3; transitive and intransitive verbs are one
LABEL = re.compile(r"[^\n]*?\\[^\\]*\\[^\n]*?, ?(n|a|v|adv)\.(?: ?[ti]\.)?")  # after the head word's pronunciation
LEFT_OUT_WORDS = {*LABELS, "t", "i"}
MIN_WORDS = 5
# Counts of version 0.48.5. Other builds of the text are used with a warning if they differ by at most 1 %.
COUNTS = {"n": 55_761, "a": 24_505, "v": 15_493, "adv": 2_814}
TOLERANCE = 0.01
SHUFFLE_SEED = 0
VOCABULARY = 30_522  # BERT's
SIGNS = ("[PAD]", "[UNK]", "[CLS]")
PADDING, UNKNOWN, CLASS = 0, 1, 2
MAX_PIECES = 64  # per entry, [CLS] in front included; further pieces are cut off

ZIPF_EXPONENT = 1.14  # of the pieces' frequencies, fitted
ZIPF_ENTRIES = 1 << 14
ZIPF_MEAN_PIECES = 33


def open_entries(data: str, cache: Path) -> tuple[Array, str]:
    """Returns dictionary entries and their source's name: real ones, or the generated stand-in `zipf`, as `data` says.

    Entries are (n, 65) uint16: the label (part of speech, 0 to 3), the [CLS] piece, then pieces, padded with 0.

    Raises:
        DataUnavailableError: `data` is `gcide`, and the dictionary or `tokenizers` is missing.
    """
    return real_or_zipf(
        data, "gcide", lambda: load_entries(cache), zipf_entries, what="entries", known=sum(COUNTS.values())
    )


def load_entries(cache: Path) -> Array:
    """Returns GCIDE's dictionary entries, (n, 65) uint16, in a fixed random order: part of speech, ids of word pieces.

    Raises:
        DataUnavailableError: the entries are not cached, and the dictionary or `tokenizers` is missing.
        RuntimeError: the text is damaged, or so different from the known one that results would not compare.
    """
    path = cache / "gcide-pieces-1.npy"
    entries = cached_array(path, lambda: _prepare(cache))
    if entries.shape[1:] != (1 + MAX_PIECES,) or entries.dtype != np.uint16:
        raise RuntimeError(
            f"{path} holds {entries.dtype} {entries.shape}, expected uint16 (entries, {1 + MAX_PIECES}); "
            "delete it and try again"
        )
    return entries


def zipf_entries(seed: int = 0) -> Array:
    """Returns seeded entries for tests without the dictionary: independent pieces by a Zipf law, (16384, 65) uint16.

    The label depends on the sum of a hidden weight per piece; the classes are as frequent as in the dictionary.
    """
    rng = np.random.default_rng(seed)
    pieces = zipf_ranks(rng, (ZIPF_ENTRIES, MAX_PIECES), VOCABULARY - len(SIGNS), ZIPF_EXPONENT) + len(SIGNS)
    pieces[:, 0] = CLASS
    lengths = rng.integers(MIN_WORDS + 1, 2 * ZIPF_MEAN_PIECES - MIN_WORDS, size=ZIPF_ENTRIES)
    pieces = np.where(np.arange(MAX_PIECES) < lengths[:, None], pieces, PADDING)
    score = np.where(pieces > CLASS, rng.standard_normal(VOCABULARY)[pieces], 0).sum(axis=1)
    share = np.array([COUNTS[label] for label in LABELS]) / sum(COUNTS.values())
    labels = np.searchsorted(np.quantile(score, np.cumsum(share)[:-1]), score)
    return np.concatenate([labels[:, None], pieces], axis=1).astype(np.uint16)


def _prepare(cache: Path) -> Array:
    start_s = time.perf_counter()
    path = fetch_debian(gcide.FILE, cache)
    samples = _samples(path)
    labels = Counter(label for label, _ in samples)
    check_counts({label: labels[label] for label in LABELS}, COUNTS, TOLERANCE, path)
    pieces_of = _pieces([words for _, words in samples])
    table = np.full((len(samples), 1 + MAX_PIECES), PADDING, dtype=np.uint16)
    for row, index in zip(table, np.random.default_rng(SHUFFLE_SEED).permutation(len(samples)), strict=True):
        label, words = samples[index]
        pieces = [CLASS, *chain.from_iterable(pieces_of[word] for word in words[:MAX_PIECES])][:MAX_PIECES]
        row[: 1 + len(pieces)] = [LABELS.index(label), *pieces]
    logger.info("prepared %d entries in %.1f s", len(table), time.perf_counter() - start_s)
    return table


def _samples(path: Path) -> list[tuple[str, list[str]]]:
    """Returns label (part of speech) and words of each dictionary entry that has a label and enough words."""
    samples = []
    for entry in gcide.read_entries(path):
        if match := LABEL.match(entry):
            text = gcide.LEFT_OUT.sub(" ", entry[match.end() :]).lower()
            words = [word for word in gcide.WORD.findall(text) if word not in LEFT_OUT_WORDS]
            if len(words) >= MIN_WORDS:
                samples.append((match[1], words))
    return samples


def _pieces(texts: list[list[str]]) -> dict[str, list[int]]:
    """Trains a vocabulary of WordPieces on the texts and returns the ids of each word's pieces.

    Raises:
        DataUnavailableError: `tokenizers` is not installed.
    """
    library = tokenizers()
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token=SIGNS[UNKNOWN]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    # The trainer numbers continuing letters in the order of a hash table unless they are given, like signs.
    letters = ["##" + letter for letter in string.ascii_lowercase + string.digits + "'-"]
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SIGNS, *letters], show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(words) for words in texts), trainer)
    return encoded(tokenizer, texts)
