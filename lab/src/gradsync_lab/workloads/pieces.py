"""Cuts words into pieces of a trained vocabulary, by the library `tokenizers`."""

from __future__ import annotations

from typing import Any

from .data import DataUnavailableError


def tokenizers() -> Any:
    """Imports and returns the library `tokenizers`.

    Raises:
        DataUnavailableError: the library is not installed, so that no vocabulary can be trained.
    """
    try:
        import tokenizers as library
    except ImportError as error:
        raise DataUnavailableError(
            "cutting words into pieces needs tokenizers, which is not installed; in the folder of gradsync: "
            "pip install './lab[bert]'"
        ) from error
    return library


def encoded(tokenizer: Any, texts: list[list[str]]) -> dict[str, list[int]]:
    """Returns the ids of each word's pieces; a word is cut once, however often it occurs."""
    types = sorted({word for words in texts for word in words})
    encodings = tokenizer.encode_batch(types, add_special_tokens=False)
    return {word: encoding.ids for word, encoding in zip(types, encodings, strict=True)}
