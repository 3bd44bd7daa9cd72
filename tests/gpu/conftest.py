"""A run of these tests fails without a GPU, as nothing was checked.

`GRADSYNC_DRY=1` runs what can run on the CPU, to try the tests themselves.
"""

from __future__ import annotations

import os

import pytest
import torch

DRY = "GRADSYNC_DRY"


def pytest_collection_finish(session: pytest.Session) -> None:
    if not torch.cuda.is_available() and not os.environ.get(DRY):
        pytest.exit("make gpu needs a GPU that torch can use, and found none: nothing was checked", returncode=2)


@pytest.fixture
def card() -> str:
    """The device of all ranks: one card, or the CPU in a dry run."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def only_on_a_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("a dry run has no card")
