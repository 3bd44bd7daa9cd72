"""Warns of frameworks in other versions than the adapters were tested with."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

logger = logging.getLogger(__name__)

TESTED = {
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "accelerate": "1.15.0",
    "transformers": "5.24.0",
    "ray": "2.60.0",
    "torchrec": "1.8.0",
}


@cache
def check_version(package: str) -> None:
    """Warns once if the installed version of a package is not the one that gradsync's adapter was tested with."""
    installed = metadata.version(package)
    if installed != TESTED[package]:
        logger.warning(
            "gradsync was tested with %s %s, and %s is installed: compare a short run with plain DDP before a long one",
            package,
            TESTED[package],
            installed,
        )
