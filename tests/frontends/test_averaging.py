"""Plans of parameters: each step mixes the ranks' models as the schedule says, and a consensus makes them one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gradsync
from gradsync import Plan
from gradsync.comm.shuffle import GroupSchedule, exact, grid, together, with_local_steps, with_ranks_absent
from gradsync.plans.plan import What
from gradsync.schemes import AllReduce, Shuffled
from gradsync.tensors.bucket import TensorSpec
from tests.frontends.models import Convolutions, Perceptron
from tests.world import Ranks, on_all_ranks

World = Callable[[int], Ranks]
SCHEDULES = {2: with_local_steps(together(2), 3), 3: exact(3, 2), 4: with_ranks_absent(grid((2, 2)), (3,), 2)}


def plan_of(model: nn.Module, schedule: GroupSchedule, *, buckets: int = 2) -> Plan:
    """Returns a plan that averages parameters by `schedule`, and cuts one parameter between two buckets."""
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    scheme, largest = Shuffled.by(schedule), max(specs, key=lambda name: specs[name].numel)
    if buckets == 1:
        return Plan.make(specs, dist.get_world_size(), [(list(specs), scheme)], what=What.PARAMETER)
    cut, others = specs[largest].numel // 2, [name for name in specs if name != largest]
    parts = [[(largest, 0, cut)], [(largest, cut, specs[largest].numel), *((n, 0, specs[n].numel) for n in others)]]
    return Plan.make(specs, dist.get_world_size(), [(part, scheme) for part in parts], what=What.PARAMETER)


def make(schedule: GroupSchedule, *, momentum: float = 0.9) -> tuple[nn.Module, SGD, gradsync.Attachment]:
    torch.manual_seed(dist.get_rank())  # attach() levels
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
    return model, optimizer, gradsync.attach(model, optimizer, plan_of(model, schedule), timeout=10)


def train(model: nn.Module, optimizer: SGD, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(5, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def everyones(model: nn.Module, handle: gradsync.Attachment | None = None) -> Tensor:
    """Returns all parameters of all ranks, (ranks, elements)."""
    if handle is not None:
        handle.wait()
    return on_all_ranks(model.parameters())


def steps_mix_as_the_schedule_says() -> None:
    schedule = SCHEDULES[dist.get_world_size()]
    model, optimizer, handle = make(schedule)
    assert torch.equal(everyones(model, handle), everyones(model, handle)[:1].expand(schedule.size, -1))
    for step in range(2 * len(schedule.rounds)):
        handle.wait()
        alone, own = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
        twin = SGD(alone.parameters(), lr=0.1, momentum=0.9)
        twin.load_state_dict(own)
        train(alone, twin, step)
        train(model, optimizer, step)
        w = torch.from_numpy(schedule.round(step).mixing).float()
        now = everyones(model, handle)
        torch.testing.assert_close(now, w @ everyones(alone))
        for group, share in schedule.round(step).parts:
            assert share != 1 or all(torch.equal(now[rank], now[group[0]]) for rank in group)
        for kept, expected in zip(optimizer.state.values(), twin.state.values(), strict=True):
            assert torch.equal(kept["momentum_buffer"], expected["momentum_buffer"]), "each rank's own"
    assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
    handle.detach()


@pytest.mark.parametrize("size", SCHEDULES)
def test_steps_mix_as_the_schedule_says(world: World, size: int) -> None:
    world(size).run(steps_mix_as_the_schedule_says)


def a_group_of_all_is_training_together() -> None:
    """Checks a group of all ranks: with a linear optimiser the mean of the steps is the step of the mean gradient."""
    model, optimizer, handle = make(together(2), momentum=0.0)
    oracle = copy.deepcopy(model)
    ddp = DistributedDataParallel(oracle)
    plain = SGD(oracle.parameters(), lr=0.1)
    for step in range(4):
        train(model, optimizer, step)
        train(ddp, plain, step)
    handle.detach()
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_group_of_all_is_training_together(world: World) -> None:
    world(2).run(a_group_of_all_is_training_together)


def a_consensus_is_the_mean() -> None:
    model, optimizer, handle = make(SCHEDULES[4])
    for step in range(3):
        train(model, optimizer, step)
    before = everyones(model, handle)
    assert not torch.equal(before[0], before[3])
    with gradsync.consensus(nn.Sequential(model)):
        now = everyones(model, handle)
        assert all(torch.equal(row, now[0]) for row in now), "the same bits"
        torch.testing.assert_close(now[0], before.mean(dim=0))
    with handle.no_sync():
        train(model, optimizer, 7)
    assert not torch.equal(everyones(model, handle)[0], everyones(model, handle)[1]), "a step of each rank's own"
    handle.detach()
    with pytest.raises(RuntimeError, match="not attached to this model"), gradsync.consensus(model):
        pass


def test_a_consensus_is_the_mean(world: World) -> None:
    world(4).run(a_consensus_is_the_mean)


def statistics_are_pooled() -> None:
    """Checks that running statistics are those of one rank that saw the samples of all."""
    torch.manual_seed(0)
    model = Convolutions()
    model.norm.momentum = 1.0
    optimizer = SGD(model.parameters(), lr=0.0)
    handle = gradsync.attach(model, optimizer, plan_of(model, together(2)), timeout=10)
    generator = torch.Generator().manual_seed(0)
    both = [scale * torch.randn(6, 2, 8, 8, generator=generator) + scale for scale in (1.0, 3.0)]
    for _ in range(1 + dist.get_rank()):
        with handle.no_sync():
            model(both[dist.get_rank()])
    handle.consensus()
    with torch.no_grad():
        seen = torch.cat([model.first(x) for x in both])
    torch.testing.assert_close(model.norm.running_mean, seen.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    # Each rank's own variance is that of a sample; pooled they are a little above that of all.
    torch.testing.assert_close(model.norm.running_var, seen.var(dim=(0, 2, 3)), rtol=1e-2, atol=0)
    assert model.norm.num_batches_tracked == 2, "the largest"
    handle.detach()


def test_statistics_of_normalisation_are_pooled(world: World) -> None:
    world(2).run(statistics_are_pooled)


def training_resumes_in_the_middle_of_a_cycle() -> None:
    schedule = SCHEDULES[3]
    model, optimizer, handle = make(schedule)
    for step in range(4):
        train(model, optimizer, step)
    content = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, handle)], content)
    for step in range(4, 7):
        train(model, optimizer, step)
    trained = everyones(model, handle)
    handle.detach()
    other, its_optimizer, its_handle = make(schedule)
    content.seek(0)
    for part, saved in zip((other, its_optimizer, its_handle), torch.load(content, weights_only=True), strict=True):
        part.load_state_dict(saved)
    for step in range(4, 7):
        train(other, its_optimizer, step)
    assert torch.equal(everyones(other, its_handle), trained)
    its_handle.detach()


def test_training_resumes_in_the_middle_of_a_cycle(world: World) -> None:
    world(3).run(training_resumes_in_the_middle_of_a_cycle)


def what_cannot_be_averaged_is_refused() -> list[str]:
    said = []
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    plan = plan_of(model, together(2), buckets=1)
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    mixed = plan_of(model, together(2))
    mixed = mixed.model_copy(
        update={"buckets": (mixed.buckets[0], mixed.buckets[1].model_copy(update={"what": What.GRADIENT}))}
    )
    scaler = torch.amp.GradScaler("cpu") if dist.get_rank() else None
    attempts: list[Callable[[], Any]] = [
        lambda: gradsync.attach(model, plan=plan, timeout=10),
        lambda: gradsync.attach(DistributedDataParallel(model), optimizer, plan, timeout=10),
        lambda: gradsync.attach(model, optimizer, plan, grad_scaler=scaler, timeout=10),
        lambda: gradsync.attach(model, optimizer, mixed, timeout=10),
        lambda: gradsync.attach(model, optimizer, lambda profiles, world: plan, timeout=10),
        lambda: gradsync.attach(model, optimizer, plan_of(model, together(3), buckets=1), timeout=10),
        lambda: gradsync.attach(model, plan=Plan.make(specs, 2, [(list(specs), Shuffled.by(together(2)))]), timeout=10),
    ]
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    gradsync.attach(model, optimizer, plan, timeout=10).detach()
    return said


def test_what_cannot_be_averaged_is_refused(world: World) -> None:
    for rank, said in enumerate(world(2).run(what_cannot_be_averaged_is_refused)):
        expected = [
            "optimizer=",
            "the model inside of it",
            "GradScaler" if rank else "rank 1 could not attach: a GradScaler",
            "must all have the same `what`",
            "give such a plan itself to attach",
            "for 3 ranks, there are 2",
            "shuffled is for parameters",
        ]
        for text, part in zip(said, expected, strict=True):
            assert part in text


def a_rank_that_missed_a_step_is_found() -> list[str]:
    model, optimizer, handle = make(together(2))
    said = []
    try:
        for step in range(3):
            if dist.get_rank() == 0 and step == 1:
                with handle.no_sync():
                    train(model, optimizer, step)
            else:
                train(model, optimizer, step)
        handle.wait()
    except RuntimeError as error:
        said.append(str(error))
    handle.detach()
    return said


def test_a_rank_that_ends_early_stops_the_others_with_an_error(world: World) -> None:
    """Rank 0 averaged once less than rank 1, which waits for it in its last step."""
    _, second = world(2).run(a_rank_that_missed_a_step_is_found)
    assert second and "rank" in second[0]


def test_parameters_may_be_averaged_by_any_scheme(world: World) -> None:
    world(2).run(plain_average)


def plain_average() -> None:
    torch.manual_seed(dist.get_rank())
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    plan = Plan.make(specs, 2, [(list(specs), AllReduce())], what=What.PARAMETER)
    handle = gradsync.attach(model, optimizer, plan, timeout=10)
    train(model, optimizer, 0)
    now = everyones(model, handle)
    assert torch.equal(now[0], now[1])
    handle.detach()
