"""Kernel times of earlier jobs are used where all ranks have them, and no file can stop a job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import LocalGroup, run_local
from gradsync.comm.backends import torch_group
from gradsync.comm.links import highest_over
from gradsync.costs.cost_model import KernelCost
from gradsync.costs.steps import Compute
from gradsync.planner.pieces import Pieces, at_once
from gradsync.plans.profile import Interval, KernelEstimate
from gradsync.schemes import AllReduce
from gradsync.tuning import earlier, kernels
from gradsync.tuning.earlier import FOLDER, SUFFIX, Costs, EarlierTimes
from gradsync.tuning.kernels import _words, kernel_costs
from gradsync.tuning.rehearsal import Sample
from tests.world import Ranks

WORK = "two kernels"


def takes(call_s: float, byte_s: float, knee_bytes: float = 0.0) -> KernelEstimate:
    """Returns a kernel's cost, whose intervals are a half wide on one side, and open on the other."""
    call, byte = Interval(value=call_s, low=call_s / 2, high=None), Interval(value=byte_s, low=0.0, high=2 * byte_s)
    return KernelEstimate(call_s=call, byte_s=byte, knee_bytes=knee_bytes)


COSTS: Costs = {"pack": takes(1e-4, 5e-10, 128.0), "sum": takes(0.5, 0.0)}
HERE = EarlierTimes((("gradsync", "1"), ("threads", "2")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache"


def measured(costs: Costs, ran: list[str]) -> Pieces[Costs]:
    ran.append("measured")
    yield
    return costs


def alone(times: EarlierTimes, costs: Costs = COSTS) -> tuple[Costs, list[str]]:
    """Returns the costs of kernels in a job of one rank, and whether it measured them."""
    ran: list[str] = []
    return at_once(times.or_measured(WORK, measured(costs, ran), list)), ran


def the_file(cache: Path) -> Path:
    (place,) = cache.iterdir()
    assert place.name.endswith(SUFFIX)
    return place


def test_a_later_job_has_the_times_of_the_first_one(cache: Path) -> None:
    assert alone(HERE) == (COSTS, ["measured"])
    assert the_file(cache).stat().st_size < earlier.MOST_BYTES
    assert alone(HERE, costs={}) == (COSTS, [])


@pytest.mark.parametrize("other", [(("gradsync", "2"), ("threads", "2")), (("gradsync", "1"), ("threads", "1"))])
def test_other_versions_and_settings_are_measured_by_themselves(other: tuple[tuple[str, str], ...]) -> None:
    alone(HERE)
    assert alone(EarlierTimes(other))[1] == ["measured"]
    assert alone(HERE)[1] == []


def test_other_work_is_measured_by_itself() -> None:
    alone(HERE)
    assert HERE.load(WORK) == COSTS and HERE.load("other kernels") is None


def test_a_job_that_has_drifted_measures_anew_and_later_jobs_have_its_times() -> None:
    alone(HERE)
    slower = {name: takes(2.0, 1e-9) for name in COSTS}
    assert alone(replace(HERE, anew=True), slower) == (slower, ["measured"])
    assert alone(HERE) == (slower, [])


def spoilt(text: str) -> Iterator[bytes]:
    """Yields contents that a file of kernel times must not have."""
    whole = json.loads(text)
    yield b""
    yield text.encode()[: len(text) // 2]
    yield b"\xff\xfe\x00"
    yield b"[1, 2]"
    yield text.replace("128.0", "256.0").encode()  # by hand, under the old digest
    yield b'{"version": 2, "kernels": {"pack": ' + b"[" * 100_000
    yield b" " * (earlier.MOST_BYTES + 1)
    del whole["digest"]
    for changed in (
        {"version": 1},
        {"more": 1},
        {"kernels": {}},
        {"circumstances": {"gradsync": "2"}},
        {"kernels": {"pack": {}}},
        {"kernels": {"pack": {**whole["kernels"]["pack"], "knee_bytes": -1.0}}},
        {"kernels": {"pack": {**whole["kernels"]["pack"], "knee_bytes": "1"}}},
        {"kernels": {"pack": {**whole["kernels"]["pack"], "call_s": {"value": 1.0, "low": 2.0, "high": None}}}},
    ):
        yield json.dumps({**whole, **changed}).encode()


def test_a_file_that_does_not_fit_is_ignored_and_replaced(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone(HERE)
    place = the_file(cache)
    text = place.read_text(encoding="utf-8")
    for content in spoilt(text):
        place.write_bytes(content)
        caplog.clear()
        with caplog.at_level("INFO", logger="gradsync"):
            assert alone(HERE) == (COSTS, ["measured"]), content[:80]
        assert "ignored" in caplog.text and str(place) in caplog.text
        assert place.read_text(encoding="utf-8") == text


def test_what_is_no_file_is_ignored(cache: Path) -> None:
    alone(HERE)
    place = the_file(cache)
    place.unlink()
    place.mkdir()
    assert alone(HERE) == (COSTS, ["measured"])
    place.rmdir()
    os.mkfifo(place)
    assert alone(HERE) == (COSTS, ["measured"])


def test_without_a_folder_to_write_to_each_job_measures(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with caplog.at_level("INFO", logger="gradsync"):
        assert alone(HERE)[1] == alone(HERE)[1] == ["measured"]
    assert "are not kept" in caplog.text
    for name in (FOLDER, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert alone(HERE)[1] == ["measured"]


def test_the_folder_is_the_users_cache_unless_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert earlier.folder() == tmp_path / "new" / "cache"
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert earlier.folder() == tmp_path / "gradsync"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert earlier.folder() == Path.home() / ".cache" / "gradsync"


def test_there_are_never_more_files_than_a_few(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "MOST_FILES", 3)
    for number in range(6):
        EarlierTimes((("number", str(number)),)).keep(WORK, COSTS)
        (cache / "data.npz").touch()  # of the lab, which stays
    assert len(list(cache.glob(f"*{SUFFIX}"))) == 3 and (cache / "data.npz").exists()
    assert EarlierTimes((("number", "5"),)).load(WORK) == COSTS


def writes_and_reads(folder: str, seconds: float) -> None:
    os.environ[FOLDER] = folder
    for _ in range(100):
        HERE.keep(WORK, {name: takes(seconds, 0.0) for name in COSTS})
        found = HERE.load(WORK)
        assert found is not None and len({cost.call_s.value for cost in found.values()}) == 1


def test_processes_that_write_at_once_leave_one_whole_file(cache: Path) -> None:
    context = get_context("forkserver")
    processes = [context.Process(target=writes_and_reads, args=(str(cache), seconds)) for seconds in (1.0, 2.0)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    found = HERE.load(WORK)
    assert found is not None and {cost.call_s.value for cost in found.values()} <= {1.0, 2.0}
    the_file(cache)


def two_ranks(of_rank: Callable[[int], EarlierTimes]) -> list[tuple[Costs, bool]]:
    """Returns each rank's costs of kernels, and whether it measured them."""

    def rank(group: LocalGroup) -> tuple[Costs, bool]:
        ran: list[str] = []
        times = of_rank(group.rank)
        found = at_once(times.or_measured(WORK, measured(COSTS, ran), highest_over(group, 5.0)))
        return found, bool(ran)

    return run_local(2, rank)


def machine(number: int) -> EarlierTimes:
    return EarlierTimes((("processor", str(number)),))


def test_if_one_rank_has_no_times_all_measure() -> None:
    machine(0).keep(WORK, COSTS)
    assert two_ranks(machine) == [(COSTS, True)] * 2
    assert two_ranks(machine) == [(COSTS, False)] * 2


def test_if_ranks_have_times_of_different_kernels_all_measure() -> None:
    machine(0).keep(WORK, COSTS)
    machine(1).keep(WORK, {"pack": COSTS["pack"]})
    assert two_ranks(machine) == [(COSTS, True)] * 2


def test_ranks_with_other_costs_plan_from_the_slowest_ones() -> None:
    schemes = (AllReduce(),)

    def rank(group: LocalGroup) -> dict[str, KernelCost]:
        slower = takes(1e-4, 2e-9, 64.0) if group.rank else takes(2e-4, 1e-9, 128.0)
        machine(group.rank).keep(_words(schemes), {"pack": slower})
        return at_once(kernel_costs(schemes, highest_over(group, 5.0), earlier=machine(group.rank)))

    first, second = run_local(2, rank)
    assert first == second == {"pack": KernelCost(2e-4, 2e-9, 64.0)}


def costs_of_a_group(folder: str) -> tuple[dict[str, KernelCost], int]:
    ran = []

    def rehearse(*_: object) -> Pieces[list[Sample]]:
        ran.append(1)
        yield
        return [((Compute("pack", nbytes),), 1e-4 + nbytes * 1e-9) for nbytes in (1e3, 1e5, 1e7)]

    os.environ[FOLDER] = folder
    with patch.object(kernels, "rehearse", rehearse), torch.no_grad():
        group = torch_group(timeout_s=15.0)
        highest = highest_over(group, 15.0)
        return at_once(kernel_costs((AllReduce(),), highest, earlier=EarlierTimes.of(group))), sum(ran)


def folder_of(folders: list[str]) -> tuple[dict[str, KernelCost], int]:
    return costs_of_a_group(folders[dist.get_rank()])


def test_jobs_of_processes_measure_once_and_a_rank_without_the_file_makes_all_measure(
    world: Callable[[int], Ranks], tmp_path: Path
) -> None:
    shared, other = str(tmp_path / "shared"), str(tmp_path / "other")
    first = world(2).run(folder_of, [shared, shared])
    second = world(2).run(folder_of, [shared, shared])
    third = world(2).run(folder_of, [shared, other])
    assert [ran for _, ran in (*first, *second, *third)] == [1, 1, 0, 0, 1, 1]
    assert second[0][0] == second[1][0] and second[0][0].keys() == first[0][0].keys()
