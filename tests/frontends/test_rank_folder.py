"""`handle.checkpoint().save(folder)` keeps every rank's state in a file of its own, and `load` mixes nothing up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.frontends import checkpoint
from gradsync.schemes import AllReduce, CompressedAllGather, Scheme
from gradsync.state import MissingStateError, load_file, read_ranks
from tests.frontends.conservation import left_to_send
from tests.frontends.test_state_checkpoints import attached, left_in_all, train
from tests.world import Ranks

World = Callable[[int], Ranks]
GATHERED = CompressedAllGather(ErrorFeedback(TopK(0.2)))


def same(model: nn.Module, handle: gradsync.Attachment, before: dict[str, Tensor]) -> bool:
    now = left_to_send(model, handle.state_dict()["state"])
    return before.keys() == now.keys() and all(torch.equal(before[name], now[name]) for name in before)


def its_own(folder: str) -> tuple[bool, list[str]]:
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    kept = {name: values.clone() for name, values in left_to_send(model, handle.state_dict()["state"]).items()}
    handle.checkpoint().save(folder)
    train(model, 2, seed=9)
    dist.barrier()
    handle.checkpoint().load(folder)
    found = same(model, handle, kept)
    handle.detach()
    return found, sorted(path.name for path in Path(folder).iterdir())


def test_each_rank_gets_its_own_state_back(world: World, tmp_path: Path) -> None:
    results = world(2).run(its_own, str(tmp_path / "made" / "anew"))
    names = [f"gradsync-rank-{rank}-of-2.safetensors" for rank in range(2)]
    assert results == [(True, names)] * 2
    states = [load_file(tmp_path / "made" / "anew" / name) for name in names]
    assert [(state["rank"], state["world"]) for state in states] == [(0, 2), (1, 2)]


def saved(folder: str) -> list[Tensor]:
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    totals = left_in_all(model, handle)
    handle.checkpoint().save(folder)
    handle.detach()
    return totals


def cannot_be_looked_at(folder: str) -> tuple[str, bool]:
    """Loads a folder that rank 1 must not look at; returns the error, and whether training goes on with all state."""
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    kept = {name: values.clone() for name, values in left_to_send(model, handle.state_dict()["state"]).items()}
    denied = PermissionError(f"[Errno 13] Permission denied: {folder!r}") if dist.get_rank() == 1 else None
    with patch.object(checkpoint, "has_ranks", side_effect=denied, return_value=True), pytest.raises(Exception) as said:
        handle.checkpoint().load(folder, missing_ok=True)
    found = same(model, handle, kept)
    train(model, 2, seed=9)
    handle.detach()
    return f"{said.type.__name__}: {said.value}", found


def test_a_folder_that_one_rank_cannot_look_at_is_an_error_on_all_and_training_goes_on(
    world: World, tmp_path: Path
) -> None:
    (first, goes_on), (second, second_goes_on) = world(2).run(cannot_be_looked_at, str(tmp_path))
    assert first.startswith("RuntimeError: loading of state: rank 1 could not: [Errno 13] Permission denied")
    assert second.startswith("PermissionError: [Errno 13] Permission denied")
    assert goes_on and second_goes_on


def loaded(folder: str) -> list[Tensor]:
    model, handle = attached(GATHERED)
    handle.checkpoint().load(folder)
    totals = left_in_all(model, handle)
    handle.detach()
    return totals


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_takes_over_all_residuals(world: World, tmp_path: Path, old: int, new: int) -> None:
    before, after = world(old).run(saved, str(tmp_path))[0], world(new).run(loaded, str(tmp_path))[0]
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(before, after, strict=True))
    assert any(total.abs().sum() > 0 for total in before)


def test_the_files_of_an_earlier_job_of_another_size_are_replaced(world: World, tmp_path: Path) -> None:
    world(3).run(saved, str(tmp_path))
    world(2).run(saved, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"gradsync-rank-{rank}-of-2.safetensors" for rank in range(2)
    ]


def refused(folder: str, scheme: Scheme[object] = GATHERED) -> str:
    _, handle = attached(scheme)
    try:
        handle.checkpoint().load(folder)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        handle.detach()
    return "loaded"


def test_a_folder_without_state_is_refused_on_all_ranks(world: World, tmp_path: Path) -> None:
    for told in world(2).run(refused, str(tmp_path / "nowhere")):
        assert told.startswith("MissingStateError") and "handle.checkpoint().save(folder)" in told


def test_a_rank_without_its_file_is_named_on_all_ranks(world: World, tmp_path: Path) -> None:
    world(2).run(saved, str(tmp_path))
    (tmp_path / "gradsync-rank-1-of-2.safetensors").unlink()
    first, second = world(2).run(refused, str(tmp_path))
    assert second.startswith("MissingStateError") and "lacks gradsync-rank-1-of-2.safetensors" in second
    assert "rank 1" in first and "gradsync-rank-1-of-2.safetensors" in first


def if_there(empty: str, folder: str) -> tuple[bool, str, bool]:
    """Loads from a folder without state, then from one in which only rank 0 finds some, then where each rank does."""

    def load(place: str) -> bool:
        return handle.checkpoint().load(place, missing_ok=True)

    model, handle = attached(GATHERED)
    nothing = load(empty)
    train(model, 1, seed=0)
    handle.checkpoint().save(folder)
    dist.barrier()
    try:
        told = str(load(folder if dist.get_rank() == 0 else empty))
    except (ValueError, RuntimeError) as error:
        told = str(error)
    train(model, 1, seed=1)
    loaded = load(folder)
    handle.detach()
    return nothing, told, loaded


def test_a_folder_without_state_may_be_passed_over_by_all_ranks_only(world: World, tmp_path: Path) -> None:
    for nothing, told, loaded in world(2).run(if_there, str(tmp_path / "empty"), str(tmp_path / "full")):
        assert not nothing and loaded
        assert "has no state of gradsync" in told


def test_files_that_changed_places_are_refused(world: World, tmp_path: Path) -> None:
    world(2).run(saved, str(tmp_path))
    one, two = (tmp_path / f"gradsync-rank-{rank}-of-2.safetensors" for rank in range(2))
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert all("is that of rank" in told for told in world(2).run(refused, str(tmp_path)))


def test_files_of_two_jobs_are_refused(tmp_path: Path) -> None:
    for name in ("gradsync-rank-0-of-2.safetensors", "gradsync-rank-0-of-3.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="has state of 2 and of 3 ranks; expected that of one job"):
        read_ranks(tmp_path, 0, 2)


def exact(folder: str) -> None:
    model, handle = attached(AllReduce())
    train(model, 1, seed=0)
    handle.checkpoint().save(folder)
    dist.barrier()
    handle.checkpoint().load(folder)
    handle.detach()


def test_plans_without_state_load_from_the_folder_too(world: World, tmp_path: Path) -> None:
    world(2).run(exact, str(tmp_path))


def test_a_state_that_is_not_complete_yet_has_no_name_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "gradsync-rank-0-of-1.unfinished").write_bytes(b"half")
    with pytest.raises(MissingStateError, match="has no state of gradsync"):
        read_ranks(tmp_path, 0, 1)
