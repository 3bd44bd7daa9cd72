"""Every adapter refuses a model that torchft averages, by torchft's name; a class of that module's name stands in."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 200
PACKAGES = {"attach": "torch", "drop-in class": "torch", "lightning": "lightning", "fabric": "lightning"}
PACKAGES |= {"accelerate": "accelerate", "torchrec": "torchrec"}
WHERE = ("outside", "around", "inside")

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Returns the error of each rank, by adapter and by where torchft's class is."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command.append(str(Path(__file__).parent / "torchft_ranks.py"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    result: dict[str, list[str]] = json.loads(line.removeprefix("FOUND "))
    return result


def test_every_adapter_was_tried(found: dict[str, list[str]]) -> None:
    installed = [way for way, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
    assert sorted(found) == sorted(f"{way}, {where}" for way in installed for where in WHERE)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("way", PACKAGES)
def test_torchft_is_refused_by_name_on_both_ranks(
    found: dict[str, list[str]], way: str, where: str, request: pytest.FixtureRequest
) -> None:
    if importlib.util.find_spec(PACKAGES[way]) is None:
        pytest.skip(f"needs {PACKAGES[way]}: make integrations")
    nested = where == "inside" or (way, where) in {("lightning", "outside"), ("accelerate", "outside")}
    if nested:
        reason = "torchft's class in a part of the model is refused as any DistributedDataParallel, without its name"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    if (way, where) == ("accelerate", "around"):
        reason = "a model that Accelerate wraps in torch's class is not searched for another wrapper: both average"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    for said in found[f"{way}, {where}"]:
        assert "torchft's DistributedDataParallel" in said
