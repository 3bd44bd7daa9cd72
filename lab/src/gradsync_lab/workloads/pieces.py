"""Words as pieces of a trained vocabulary, by the library `tokenizers`."""

from __future__ import annotations

from typing import Any

from .data import DataUnavailableError


def tokenizers() -> Any:
    """The library.

    Raises:
        DataUnavailableError: when it is not installed: a vocabulary cannot be had otherwise.
    """
    try:
        import tokenizers as library
    except ImportError as error:
        raise DataUnavailableError(
            "cutting words into pieces needs tokenizers and it is not installed: pip install 'gradsync-lab[bert]'"
        ) from error
    return library


def encoded(tokenizer: Any, texts: list[list[str]]) -> dict[str, list[int]]:
    """The ids of the pieces of each word of the texts; a word is cut once, however often it stands there."""
    types = sorted({word for words in texts for word in words})
    encodings = tokenizer.encode_batch(types, add_special_tokens=False)
    return {word: encoding.ids for word, encoding in zip(types, encodings, strict=True)}
