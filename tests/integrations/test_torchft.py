"""Every adapter refuses a model that torchft averages, by torchft's name; a class of that module's name stands in."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integrations.launching import HERE, LIMIT_S, found_in, torchrun

PACKAGES = {"attach": "torch", "drop-in class": "torch", "lightning": "lightning", "fabric": "lightning"}
PACKAGES |= {"accelerate": "accelerate", "torchrec": "torchrec"}
WHERE = ("outside", "around", "inside")

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Returns the error of each rank, by adapter and by where torchft's class is."""
    errors: dict[str, list[str]] = found_in(torchrun(HERE / "torchft_ranks.py"))
    return errors


def test_every_adapter_was_tried(found: dict[str, list[str]]) -> None:
    installed = [way for way, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
    assert sorted(found) == sorted(f"{way}, {where}" for way in installed for where in WHERE)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("way", PACKAGES)
def test_torchft_is_refused_by_name_on_both_ranks(found: dict[str, list[str]], way: str, where: str) -> None:
    if importlib.util.find_spec(PACKAGES[way]) is None:
        pytest.skip(f"needs {PACKAGES[way]}: make integrations")
    for said in found[f"{way}, {where}"]:
        assert "torchft's DistributedDataParallel" in said
