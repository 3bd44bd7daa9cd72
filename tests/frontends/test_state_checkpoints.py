"""State of all ranks in one checkpoint: sharded libraries, libraries in which rank 0 writes, and files."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.plans.plan import What
from gradsync.schemes import AllReduce, CompressedAllGather, CompressedTwoWay, PowerSGD, Scheme
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.frontends.conservation import left_to_send
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]
FEEDBACK = ErrorFeedback(TopK(0.2))
TWO_WAY, GATHERED = CompressedTwoWay(FEEDBACK), CompressedAllGather(FEEDBACK)
LOW_RANK = PowerSGD(1, min_compression=1.0)


def attached(scheme: Scheme[Any], **settings: Any) -> tuple[nn.Module, gradsync.Attachment]:
    torch.manual_seed(0)
    model = Perceptron()
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), scheme)])
    return model, gradsync.attach(model, plan=plan, timeout=10, **settings)


def train(model: nn.Module, steps: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return [parameter.detach().clone() for parameter in model.parameters()]


def left_in_all(model: nn.Module, handle: gradsync.Attachment) -> list[Tensor]:
    """Returns the sum of all ranks' residuals of each parameter, in float64."""
    totals = [values.double() for values in left_to_send(model, handle.state_dict()["state"]).values()]
    for total in totals:
        dist.all_reduce(total)
    return totals


@contextmanager
def quiet_library() -> Iterator[None]:
    """Ignores, inside, the warnings of `torch.distributed.checkpoint`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(folder: str, handle: gradsync.Attachment) -> None:
    with quiet_library():
        dcp.save({"gradsync": handle.checkpoint()}, checkpoint_id=folder)


def read(folder: str, handle: gradsync.Attachment) -> None:
    with quiet_library():
        dcp.load({"gradsync": handle.checkpoint()}, checkpoint_id=folder)


def save_sharded(folder: str, scheme: Scheme[Any]) -> list[Tensor]:
    model, handle = attached(scheme)
    train(model, 3, seed=0)
    left = left_in_all(model, handle)
    assert any(values.any() for values in left)
    write(folder, handle)
    handle.detach()
    return left


def goes_through_a_sharded_checkpoint(folder: str, scheme: Scheme[Any]) -> None:
    model, handle = attached(scheme)
    train(model, 3, seed=0)
    weights, saved = copy.deepcopy(model.state_dict()), handle.state_dict()["state"]
    with quiet_library():
        dcp.save({"model": model.state_dict(), "gradsync": handle.checkpoint()}, checkpoint_id=folder)
    expected = train(model, 3, seed=7)
    handle.detach()
    model, handle = attached(scheme)
    model.load_state_dict(weights)
    with quiet_library():
        dcp.load({"model": model.state_dict(), "gradsync": handle.checkpoint()}, checkpoint_id=folder)
    found = handle.state_dict()["state"]
    assert found.keys() == saved.keys() and found
    for key, values in saved.items():
        assert torch.equal(found[key], values), key
    for got, value in zip(train(model, 3, seed=7), expected, strict=True):
        assert torch.equal(got, value)
    handle.detach()


@pytest.mark.parametrize("scheme", [TWO_WAY, GATHERED, LOW_RANK], ids=["two ways", "gathered", "low rank"])
def test_state_goes_through_a_sharded_checkpoint_to_the_bit(world: World, scheme: Scheme[Any], tmp_path: Path) -> None:
    world(2).run(goes_through_a_sharded_checkpoint, str(tmp_path), scheme)


def load_elsewhere(folder: str, scheme: Scheme[Any], exact: bool, before: list[Tensor]) -> None:
    for plan in (scheme,) if scheme == LOW_RANK else (scheme, AllReduce()):  # which keeps no factors
        model, handle = attached(plan)
        read(folder, handle)
        assert handle.state_dict()["step"] == 3
        for found, value in zip(left_in_all(model, handle), before, strict=True):
            if exact:
                assert torch.equal(found, value), plan.title
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9)
        train(model, 2, seed=1)
        handle.detach()


# With more ranks each takes over from one, so sums are kept bit by bit, unless residuals of sums are added (TWO_WAY).
@pytest.mark.parametrize(
    ("scheme", "before", "size"),
    [
        *((TWO_WAY, *sizes) for sizes in ((3, 2), (2, 3), (1, 3), (3, 1))),
        *((GATHERED, *sizes) for sizes in ((3, 2), (2, 3), (3, 1))),
        *((LOW_RANK, *sizes) for sizes in ((3, 2), (1, 3))),
    ],
)
def test_the_sum_of_what_is_left_is_kept_on_other_numbers_of_ranks(
    world: World, before: int, size: int, scheme: Scheme[Any], tmp_path: Path
) -> None:
    left = world(before).run(save_sharded, str(tmp_path), scheme)[0]
    world(size).run(load_elsewhere, str(tmp_path), scheme, size > before and scheme is not TWO_WAY, left)


def load_without_factors(folder: str, before: list[Tensor]) -> None:
    model, handle = attached(AllReduce())
    with pytest.raises((ValueError, RuntimeError), match=r"drop it by load_state_dict\(..., strict=False\)"):
        read(folder, handle)
    parts = handle.checkpoint().state_dict()
    with quiet_library():
        dcp.load({"gradsync": parts}, checkpoint_id=folder)
    handle.checkpoint().load_state_dict(parts, strict=False)
    for found, value in zip(left_in_all(model, handle), before, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9)
    train(model, 2, seed=1)
    handle.detach()


def test_without_strict_a_checkpoint_fits_a_plan_that_keeps_less(world: World, tmp_path: Path) -> None:
    left = world(3).run(save_sharded, str(tmp_path), LOW_RANK)[0]
    world(2).run(load_without_factors, str(tmp_path), left)


def gradients_arrive(folder: str, before: list[Tensor]) -> None:
    """Checks that the next mean gradients hold all residuals, weighted as each rank's gradients are."""
    model, handle = attached(AllReduce())
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(5, 6, generator=generator)
    model(x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    read(folder, handle)
    model(x).square().mean().backward()
    for p, gradient, left in zip(model.parameters(), plain, before, strict=True):
        brought = (p.grad - gradient).double().flatten() * dist.get_world_size()
        torch.testing.assert_close(brought, left, rtol=1e-4, atol=1e-5)
    handle.detach()


def test_what_was_left_arrives_with_the_next_gradients_of_fewer_ranks(world: World, tmp_path: Path) -> None:
    left = world(3).run(save_sharded, str(tmp_path), GATHERED)[0]
    world(2).run(gradients_arrive, str(tmp_path), left)


def a_mixture_is_refused(folder: str, as_stateful: bool) -> str:
    """Writes entries under one key on all ranks: the library takes them for copies and mixes ranks."""
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    with quiet_library():
        dcp.save({"gradsync": handle if as_stateful else handle.state_dict()}, checkpoint_id=folder)
    train(model, 1, seed=3)
    before = handle.state_dict()
    loaded: dict[str, Any] = {"gradsync": handle if as_stateful else handle.state_dict()}
    with quiet_library(), pytest.raises(ValueError, match=r"save and load handle.checkpoint\(\)") as caught:
        dcp.load(loaded, checkpoint_id=folder)
        handle.load_state_dict(loaded["gradsync"])
    after = handle.state_dict()
    assert after["step"] == before["step"]
    assert all(torch.equal(after["state"][key], values) for key, values in before["state"].items())
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize("as_stateful", [False, True])
def test_state_under_one_key_for_all_ranks_is_refused_on_all(world: World, as_stateful: bool, tmp_path: Path) -> None:
    said = world(2).run(a_mixture_is_refused, str(tmp_path), as_stateful)
    assert said[0] == said[1] and "ranks 0, 1 were given the same state" in said[0]


def written_by_rank_0(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns what all ranks read where a library lets rank 0 write the object that each rank made."""
    content: list[Any] = [None]
    if dist.get_rank() == 0:
        stream = io.BytesIO()
        torch.save(saved, stream)
        content = [stream.getvalue()]
    dist.broadcast_object_list(content, 0)
    loaded: dict[str, Any] = torch.load(io.BytesIO(content[0]), weights_only=True)
    return loaded


def copies_are_parts_as_well() -> None:
    """Copies the parts, as libraries that write in the background or send them to another process do."""
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    before, parts = handle.state_dict(), handle.checkpoint().state_dict()
    for copied in (copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))):
        assert all(value is None or isinstance(value, bytes) for value in copied.values())
        train(model, 1, seed=3)
        handle.checkpoint().load_state_dict(copied)
        assert all(torch.equal(values, before["state"][key]) for key, values in handle.state_dict()["state"].items())
    handle.detach()


def test_copies_of_parts_are_loaded_as_well(world: World) -> None:
    world(2).run(copies_are_parts_as_well)


def test_parts_for_more_ranks_than_a_checkpoint_has_entries_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.frontends.checkpoint.MOST_RANKS", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        handle = gradsync.attach(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"has entries for 0 ranks, there are 1: save each rank's state_dict\(\)"):
            handle.checkpoint().state_dict()
        handle.detach()
    finally:
        dist.destroy_process_group()


def part_of(parts: dict[str, Any], rank: int) -> bytes:
    return bytes(parts[f"rank {rank}"].numpy())


def rank_0_writes_for_all() -> None:
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    saved, whole, part = (each.state_dict() for each in (handle, handle.checkpoint(gather=True), handle.checkpoint()))
    train(model, 1, seed=3)
    handle.checkpoint(gather=True).load_state_dict(written_by_rank_0(whole))
    for key, values in handle.state_dict()["state"].items():
        assert torch.equal(values, saved["state"][key]), key
    before = handle.state_dict()
    with pytest.raises(ValueError, match=r"these ranks found rank 0 of 2.* save handle.checkpoint\(gather=True\)"):
        handle.checkpoint().load_state_dict(written_by_rank_0(part))
    with pytest.raises(ValueError, match=r"ranks 0, 1 were given the same state, that of rank 0.*gather=True"):
        handle.load_state_dict(written_by_rank_0(saved))
    for wrong, text in (({"model": 1}, "entries such as 'rank 0', got 'model'"), ({}, "these ranks found none")):
        with pytest.raises(ValueError, match=text):
            handle.checkpoint().load_state_dict(wrong)
    stream = io.BytesIO()  # each rank its own file
    torch.save(part, stream)
    handle.checkpoint().load_state_dict(torch.load(io.BytesIO(stream.getvalue()), weights_only=True))
    damaged = {**whole, "rank 1": whole["rank 1"][:-4]}
    with pytest.raises((ValueError, RuntimeError), match=r"bytes are not what gradsync.state.to_bytes made"):
        handle.checkpoint().load_state_dict(damaged if dist.get_rank() == 1 else whole)
    after = handle.state_dict()
    assert all(torch.equal(after["state"][key], values) for key, values in before["state"].items())
    for entry in ("rank", "world"):
        part = {
            **gradsync.state.from_bytes(part_of(whole, 0)),
            entry: torch.ones(1),
        }  # as a flipped bit makes
        damaged = {**whole, "rank 0": gradsync.state.to_bytes(part)}
        with pytest.raises((ValueError, RuntimeError), match=r"the state's (rank|world) must be a whole number"):
            handle.checkpoint().load_state_dict(damaged if dist.get_rank() == 0 else whole)
    train(model, 1, seed=4)
    handle.detach()


def test_a_library_that_lets_rank_0_write_gets_all_parts_or_is_refused(world: World) -> None:
    world(2).run(rank_0_writes_for_all)


def gather_behind_an_averaged_step() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), AllReduce())], what=What.PARAMETER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, optimizer, plan, timeout=10)
    for step in range(3):
        model.zero_grad()
        model(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()  # the exchange goes on behind it
    saved = handle.checkpoint(gather=True).state_dict()
    assert len(saved) == dist.get_world_size()
    handle.checkpoint(gather=True).load_state_dict(saved)
    handle.detach()


def test_all_parts_are_gathered_while_averages_are_under_way(world: World) -> None:
    world(2).run(gather_behind_an_averaged_step)


def files_of_each_rank(folder: str) -> None:
    rank = dist.get_rank()
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    for number, saved in enumerate((handle.state_dict(), handle.checkpoint(gather=True).state_dict())):
        path = Path(folder) / f"{number}.{rank}.safetensors"
        gradsync.state.save_file(saved, path)
        loaded = gradsync.state.load_file(path)
        assert loaded.keys() == saved.keys()
        (handle if number == 0 else handle.checkpoint()).load_state_dict(loaded)
    path = Path(folder) / f"parts.{rank}.safetensors"
    gradsync.state.save_file(handle.checkpoint().state_dict(), path)
    handle.checkpoint().load_state_dict(gradsync.state.load_file(path))
    saved = handle.state_dict()
    gradsync.state.save_file(saved, path)
    loaded = gradsync.state.load_file(path)
    assert {k: v for k, v in loaded.items() if k != "state"} == {k: v for k, v in saved.items() if k != "state"}
    assert all(torch.equal(loaded["state"][key], values) for key, values in saved["state"].items())
    for wrong in (folder, Path(folder) / "none", "/dev/null"):
        with pytest.raises(ValueError, match=rf"^{wrong}: "):
            gradsync.state.load_file(wrong)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"no file that gradsync.state.save_file wrote"):
        gradsync.state.load_file(path)
    with pytest.raises(TypeError, match=r"the state's 'state/a' is a object, which safetensors cannot hold"):
        gradsync.state.save_file({"state": {"a": object()}}, path)
    handle.detach()


def test_state_goes_through_safetensors(world: World, tmp_path: Path) -> None:
    world(2).run(files_of_each_rank, str(tmp_path))


def test_any_nested_state_comes_back_from_a_file(tmp_path: Path) -> None:
    state = {
        "tensor": torch.arange(3.0),
        "references": {"tensor": torch.zeros(2, 0, dtype=torch.bfloat16), "odd/name": torch.ones(())},
        "text": "ä",
        "numbers": [1, 2.5, None, True],
        "bytes": b"\0\1",
        "empty": {},
        "alike": [{"tensor": "text"}, {"bytes": "text"}, {"dict": {"dict": {}}}, {"tensor": "text", "dict": {}}],
    }
    gradsync.state.save_file(state, tmp_path / "state")
    found = gradsync.state.load_file(tmp_path / "state")
    for key in ("text", "numbers", "bytes", "empty", "alike"):
        assert found[key] == state[key]
    torch.testing.assert_close(found["references"], state["references"])
    torch.testing.assert_close(found["tensor"], state["tensor"])


def test_a_damaged_header_is_a_value_error() -> None:
    kept = {"x": torch.ones(2, dtype=torch.bfloat16)}
    for text in ("3", "[" * 100_000, '{"a": {"tensor": "y"}}', '{"a": {"bytes": "x"}}', '{"a": '):
        with pytest.raises(ValueError, match=r"are not what gradsync.state.to_bytes made"):
            gradsync.state.from_bytes(safetensors.torch.save(kept, {"gradsync": text}))


def states_of(scheme: Scheme[Any]) -> bytes:
    model, handle = attached(scheme)
    train(model, 3, seed=0)
    stream = io.BytesIO()
    torch.save(handle.state_dict(), stream)
    handle.detach()
    return stream.getvalue()


def loads(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return found


def only_as_advised(contents: list[bytes], scheme: Scheme[Any]) -> None:
    states, rank, size = [loads(content) for content in contents], dist.get_rank(), dist.get_world_size()
    model, handle = attached(scheme)
    with pytest.raises(ValueError, match=rf"gradsync.state.redistribute\(states, {size}\)"):
        handle.load_state_dict(states[rank % len(states)])
    assert handle.state_dict()["step"] == 0
    handle.load_state_dict(gradsync.state.redistribute(states, size)[rank])
    before = [torch.zeros(p.numel(), dtype=torch.float64) for p in model.parameters()]
    for state in states:
        left = left_to_send(model, state["state"]).values()
        before = [total + values for total, values in zip(before, left, strict=True)]
    for found, value in zip(left_in_all(model, handle), before, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9)
    handle.detach()


@pytest.mark.parametrize("scheme", [TWO_WAY, GATHERED], ids=["two ways", "gathered"])
@pytest.mark.parametrize(("before", "size"), [(3, 2), (2, 3)])
def test_states_of_another_number_of_ranks_are_redistributed_or_refused(
    world: World, before: int, size: int, scheme: Scheme[Any]
) -> None:
    contents = world(before).run(states_of, scheme)
    world(size).run(only_as_advised, contents, scheme)


def gather_into_a_file(path: str) -> list[Tensor]:
    model, handle = attached(GATHERED)
    train(model, 3, seed=0)
    left, parts = left_in_all(model, handle), handle.checkpoint(gather=True).state_dict()
    if dist.get_rank() == 0:
        gradsync.state.save_file(parts, path)
    handle.detach()
    return left


def load_one_file(path: str, before: list[Tensor]) -> None:
    model, handle = attached(GATHERED)
    parts = gradsync.state.load_file(path)
    for missing in ("rank 0", "rank 2"):
        with pytest.raises(ValueError, match="must have the parts of all ranks that saved it, these ranks found rank"):
            handle.checkpoint().load_state_dict({name: part for name, part in parts.items() if name != missing})
    assert handle.state_dict()["step"] == 0
    handle.checkpoint().load_state_dict(parts)
    for found, value in zip(left_in_all(model, handle), before, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-9)
    handle.detach()


@pytest.mark.parametrize("size", [2, 4])
def test_one_file_that_rank_0_wrote_fits_another_number_of_ranks(world: World, size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "state.safetensors")
    left = world(3).run(gather_into_a_file, path)[0]
    world(size).run(load_one_file, path, left)


def test_only_the_states_of_all_ranks_at_one_step_are_redistributed(world: World) -> None:
    states = [loads(content) for content in world(2).run(states_of, GATHERED)]
    for wrong, text in (
        (states[:1], "expected the states of all ranks of one job, each once, got rank 0 of 2"),
        ([states[0]] * 2, "got rank 0 of 2, rank 0 of 2"),
        ([], "got none"),
        ([states[0], {**states[1], "step": 9}], "their step differ, 3, 9"),
        ([states[0], {"version": 2}], "expected states of version 3"),
    ):
        with pytest.raises(ValueError, match=text):
            gradsync.state.redistribute(wrong, 3)
    with pytest.raises(ValueError, match="world must be at least 1, got 0"):
        gradsync.state.redistribute(states, 0)
    back = gradsync.state.redistribute(gradsync.state.redistribute(states[::-1], 5), 2)
    assert [state["rank"] for state in back] == [0, 1] and {state["world"] for state in back} == {2}
    model = Perceptron()
    for state, same in zip(back, states, strict=True):
        for found, value in zip(*(left_to_send(model, s["state"]).values() for s in (state, same)), strict=True):
            assert torch.equal(found, value)
