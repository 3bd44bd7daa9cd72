"""English prose as tokens: the text of a dictionary by byte-pair encoding (Sennrich et al., 2016), as for GPT-2.

The text is GCIDE's (see `gcide`): entries in the same random order, without etymologies and pronunciations, in original
case, one space between words, and a separator between entries. `tokenizers` trains a vocabulary of 8,192 on one entry
in five; every byte has a token, so that no text is unknown.
"""

from __future__ import annotations

import logging
import re
import time
from array import array
from pathlib import Path

import numpy as np

from . import gcide
from .data import Array, cached_array, check_counts, fetch_debian, real_or_zipf, zipf_ranks
from .pieces import encoded, tokenizers

logger = logging.getLogger(__name__)

VOCABULARY = 8_192
SEPARATOR = 0
SIGNS = ("<|endoftext|>",)  # GPT-2's name of the separator
# Counts of version 0.48.5. Other builds of the text are used with a warning if they differ by at most 1 %.
COUNTS = {"entries": 127_968, "tokens": 8_691_448}
TOLERANCE = 0.01
TRAINED_ON = 5  # trained on every 5th entry: the vocabulary hardly differs, and training takes a fifth of the time
WORD = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+")  # with the space before; no token spans two words

ZIPF_EXPONENT = 0.96  # of the tokens' frequencies, fitted
ZIPF_TOKENS = 1 << 19


def open_tokens(data: str, cache: Path) -> tuple[Array, str]:
    """Returns tokens and the name of their source: real ones, or the generated stand-in `zipf`, as `data` says.

    Tokens are (n,) uint16 below 8,192.

    Raises:
        DataUnavailableError: `data` is `gcide`, and the dictionary or `tokenizers` is missing.
    """
    return real_or_zipf(data, "gcide", lambda: load_tokens(cache), zipf_tokens, what="tokens", known=COUNTS["tokens"])


def load_tokens(cache: Path) -> Array:
    """Returns the text of the GCIDE dictionary as byte-pair token ids, (n,) uint16, entries in a fixed random order.

    Raises:
        DataUnavailableError: the tokens are not cached, and the dictionary or `tokenizers` is missing.
        RuntimeError: the text is damaged, or so different from the known one that results would not compare.
    """
    path = cache / "gcide-tokens-1.npy"
    tokens = cached_array(path, lambda: _prepare(fetch_debian(gcide.FILE, cache)))
    if tokens.ndim != 1 or tokens.dtype != np.uint16:
        raise RuntimeError(
            f"{path} holds {tokens.dtype} {tokens.shape}, expected uint16 of one axis; delete it and try again"
        )
    return tokens


def zipf_tokens(seed: int = 0) -> Array:
    """Returns seeded tokens for tests without the dictionary: independent ones, (524288,) uint16, by a Zipf law."""
    ranks = zipf_ranks(np.random.default_rng(seed), ZIPF_TOKENS, VOCABULARY, ZIPF_EXPONENT)
    return np.asarray(ranks, dtype=np.uint16)


def _prepare(path: Path) -> Array:
    start_s = time.perf_counter()
    entries = gcide.read_entries(path)
    order = np.random.default_rng(gcide.SHUFFLE_SEED).permutation(len(entries))
    texts = [WORD.findall(" ".join(gcide.LEFT_OUT.sub(" ", entries[index]).split())) for index in order]
    tokens_of = _tokens(texts)
    tokens = array("H")
    for text in texts:
        for word in text:
            tokens.extend(tokens_of[word])
        tokens.append(SEPARATOR)
    check_counts({"entries": len(texts), "tokens": len(tokens)}, COUNTS, TOLERANCE, path)
    logger.info("prepared %d tokens in %.1f s", len(tokens), time.perf_counter() - start_s)
    return np.frombuffer(tokens, dtype=np.uint16)


def _tokens(texts: list[list[str]]) -> dict[str, list[int]]:
    """Trains a vocabulary on some of the texts and returns the ids of each word's tokens.

    Raises:
        DataUnavailableError: `tokenizers` is not installed.
    """
    library = tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())  # all bytes
    trainer = library.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SIGNS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(("".join(words) for words in texts[::TRAINED_ON]), trainer)
    return encoded(tokenizer, texts)
