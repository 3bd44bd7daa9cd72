"""torch's own tests of DDP, run on DDP, on gradsync's class in its place, and on DDP with gradsync's hook."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.torch_ddp import ranks

HERE = Path(__file__).parent
for needed in ("expecttest", "torch.testing._internal.distributed.distributed_test"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"torch's own tests need {needed}, which is not installed", allow_module_level=True)


def listed(file: str) -> dict[str, str]:
    """Returns {test: remark} as a list file has them."""
    lines = (line.partition(": ") for line in (HERE / file).read_text().splitlines() if line)
    return {name: said for name, _, said in lines}


# Tests of an argument that torch 2.11 does not have, nor these tests.
OF_FORWARD_SYNC_BUFFERS = {
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_respects_forward_sync_buffers_false",
}
MISSING = set() if "forward_sync_buffers" in signature(DistributedDataParallel).parameters else OF_FORWARD_SYNC_BUFFERS

# Plain DDP passes them on the CPU with two ranks.
RUN = {name: said for name, said in listed("applicable.txt").items() if name not in MISSING}
NOT_APPLICABLE = listed("not_applicable.txt")  # what of DDP's inside they name, which gradsync's class does not have
NOT_ON_CPU = listed("not_on_cpu.txt")  # why plain DDP fails or skips them there

# Tests that fail, and why: see "torch's own tests" in docs/concepts/semantics.md.
FAILING: dict[str, dict[str, str]] = {
    "plain": {},
    "drop-in": {
        "test_ddp_native_mixed_precision_ignored_params": "mixed_precision= is refused: torch.autocast is for that",
        "test_ddp_profiling_torch_profiler": "it looks for the Reducer's event search_unused_parameters in a profile",
    },
    "hook": {
        "test_ddp_native_mixed_precision_ignored_params": "mixed_precision= is a communication hook, DDP takes but one",
        "test_ddp_profiling_torch_profiler": "it counts the Reducer's own all-reduces in a profile",
    },
}


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("way", FAILING)
def test_passes(way: str, name: str, request: pytest.FixtureRequest) -> None:
    if reason := FAILING[way].get(name):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    outcome = ranks.run(way, name, request.config.getoption("--ranks"))
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.passed, outcome.failures


@pytest.mark.parametrize("way", FAILING)
def test_few_fail(way: str) -> None:
    assert len(FAILING[way]) <= 2
    assert FAILING[way].keys() <= RUN.keys()


def test_every_test_of_ddp_is_listed() -> None:
    """A test is not applicable only if its source names a part that gradsync's class does not have."""
    code = """
import json
from tests.torch_ddp import suite
found = {name: sorted(set(suite.OF_INTERNALS.findall(suite.source(name)))) for name in suite.names()}
print(json.dumps(found))
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    named: dict[str, list[str]] = json.loads(printed.splitlines()[-1])
    assert sorted(named) == sorted([*RUN, *NOT_APPLICABLE, *NOT_ON_CPU])
    for name, said in NOT_APPLICABLE.items():
        assert ", ".join(named[name]) == said, name
