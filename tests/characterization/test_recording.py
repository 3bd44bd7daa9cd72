"""Recordings of a script's gradients: each rank's own, before they are exchanged, in files without any code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.characterization.footprint import Footprint, Footprints, Shape
from gradsync.characterization.recording import (
    Recorder,
    await_recording,
    discard_recording,
    load_recording,
    path_of,
    save_recording,
)
from gradsync.engine.step_listener import RecordingDone, active, recording
from tests.world import Ranks


def footprints(*indices: int) -> Footprints:
    shape = Shape((6, 2))
    gradient = torch.zeros(6, 2)
    gradient[list(indices)] = 1.0
    halves = gradient.clone()
    halves[:, 1] = 0
    return {
        "w": Footprint.of(gradient, shape),
        "half/w": Footprint.of(halves, shape),
        "none": Footprint.of(None, shape),
    }


def same(a: Footprint, b: Footprint) -> bool:
    settings = (a.shape, a.sampling, a.sparse, a.full) == (b.shape, b.sampling, b.sparse, b.full)
    return settings and a.units.equal(b.units) and a.element_indices().equal(b.element_indices())


def test_a_recording_gives_back_what_every_rank_saved(tmp_path: Path) -> None:
    steps = [[footprints(0, 3), footprints(5)], [footprints(), footprints(1)]]
    for rank in range(2):
        save_recording(tmp_path, [ranks[rank] for ranks in steps], rank=rank, ranks=2)
    loaded = load_recording(tmp_path)
    assert [len(ranks) for ranks in loaded] == [2, 2]
    for expected, ranks in zip(steps, loaded, strict=True):
        for mine, found in zip(expected, ranks, strict=True):
            assert list(mine) == list(found)
            assert all(same(mine[name], found[name]) for name in mine)


def test_incomplete_and_mixed_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no recording in"):
        load_recording(tmp_path)
    save_recording(tmp_path, [footprints(1)], rank=1, ranks=2)
    with pytest.raises(ValueError, match=re.escape("files of ranks [1], of recordings by [2] ranks")):
        load_recording(tmp_path)
    save_recording(tmp_path / "first", [footprints(1)], rank=0, ranks=2)
    with pytest.raises(ValueError, match=re.escape("files of ranks [0], of recordings by [2] ranks")):
        load_recording(tmp_path / "first")
    save_recording(tmp_path, [footprints(1), footprints(2)], rank=0, ranks=2)
    with pytest.raises(ValueError, match=re.escape("same number of steps, at least one; got [2, 1]")):
        load_recording(tmp_path)
    with pytest.raises(RuntimeError, match=r"no recording of rank 2, 3 in .* after 0.1 s"):
        await_recording(tmp_path, 4, 0.1)


def test_files_that_are_no_recording_are_refused_and_nothing_in_them_runs(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    save_recording(tmp_path, [footprints(1)], rank=0, ranks=1)
    whole = path.read_bytes()
    with np.load(path) as arrays:
        content = dict(arrays)
    wrong: dict[str, Callable[[], object]] = {
        "cut": lambda: path.write_bytes(whole[: len(whole) // 2]),
        "text": lambda: path.write_text("hello"),
        "empty": lambda: path.write_bytes(b""),
        "objects": lambda: np.savez(path, **{**content, "footprints": np.array({"a": 1}, dtype=object)}),
        "missing": lambda: np.savez(path, footprints=content["footprints"]),
        "range": lambda: np.savez(path, **{**content, "units.0.0": np.array([9])}),
        "order": lambda: np.savez(path, **{**content, "units.0.0": np.array([2, 1])}),
        "type": lambda: np.savez(path, **{**content, "units.0.0": np.array([1.0])}),
    }
    for name, write in wrong.items():
        write()
        with pytest.raises(ValueError, match=r"rank0.npz: not a recording"):
            load_recording(tmp_path)
        assert name


def test_only_stale_files_of_this_recording_are_discarded(tmp_path: Path) -> None:
    for name in ("rank0.npz", "rank1.npz", "rank7.npz", "ranking.npz", "other.txt"):
        (tmp_path / name).write_text("")
    discard_recording(tmp_path, rank=1, ranks=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.txt", "rank0.npz", "rank7.npz", "ranking.npz"]
    discard_recording(tmp_path, rank=0, ranks=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.txt", "ranking.npz"]


def test_one_step_in_every_is_kept_of_the_first_engine() -> None:
    first, second = object(), object()
    recorder = Recorder(steps=2, sample=None, every=3)
    with recording(recorder):
        assert active() is recorder
        with pytest.raises(RuntimeError, match="already"), recording(Recorder(steps=1)):
            pass
        for step in range(10):
            for engine in (first, second):
                # What cannot be looked at shows that the other steps are not looked at.
                gradient = torch.eye(2).to_sparse() if step % 3 else torch.tensor([float(step), 1.0])
                recorder.take(engine, "w", gradient, (2,))
                recorder.step_ended(engine, ["w"])
    assert active() is None
    assert [f["w"].units.tolist() for f in recorder.footprints] == [[1], [0, 1]]
    assert recorder._seen == 4  # the step after which the block ended


def test_a_compressed_recording_is_refused_as_it_could_be_of_any_size(tmp_path: Path) -> None:
    save_recording(tmp_path, [{"w": Footprint.of(torch.ones(4), Shape((4,)))}], rank=0, ranks=1)
    assert load_recording(tmp_path)
    with np.load(path_of(tmp_path, 0)) as arrays:
        kept = dict(arrays)
    np.savez_compressed(path_of(tmp_path, 0), **kept)
    with pytest.raises(ValueError, match=r"rank0\.npz: not a recording of footprints: it is compressed"):
        load_recording(tmp_path)


def test_steps_must_be_positive() -> None:
    for wrong in ({"steps": 0}, {"every": 0}, {"sample": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1.*, got 0"):
            Recorder(**{"steps": 1, **wrong})


class Table(nn.Module):
    """A sparse table, a dense layer, and a parameter that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.table = nn.Embedding(10, 2, sparse=True)
        self.layer = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.layer(self.table(ids)).sum()
        return out + self.unused.sum() if dist.get_rank() == 1 else out


def train_until_ended(ddp: bool) -> tuple[list[list[str]], list[list[list[int]]], int]:
    """Trains for more steps than are recorded; returns the recording and the number of finished steps."""
    torch.manual_seed(0)
    model: nn.Module = Table()
    if ddp:
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finished = 0
    with recording(Recorder(steps=3, sample=None)) as recorder:
        gradsync.attach(model)
        for step in range(10):
            optimizer.zero_grad()
            try:
                model(torch.tensor([dist.get_rank(), 4 + step, 4 + step])).backward()
            except Exception:  # as a script may have it
                raise AssertionError("the end of a recording is no error") from None
            optimizer.step()
            finished += 1
    names = [list(f) for f in recorder.footprints]
    units = [[f["table.weight"].units.tolist(), f["unused"].units.tolist()] for f in recorder.footprints]
    return names, units, finished


@pytest.mark.parametrize("ddp", [False, True])
def test_ranks_record_their_own_gradients_and_all_end_after_the_steps(ddp: bool, world: Callable[[int], Ranks]) -> None:
    for rank, (names, units, finished) in enumerate(world(2).run(train_until_ended, ddp)):
        assert names == [["unused", "table.weight", "layer.weight", "layer.bias"]] * 3
        assert units == [[[rank, 4 + step], [0, 1, 2] if rank == 1 else []] for step in range(3)]
        assert finished == 2


def test_done_is_no_exception_that_scripts_catch() -> None:
    assert not issubclass(RecordingDone, Exception)
