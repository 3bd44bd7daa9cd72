"""Gradients or parameters: the faster kind of plan stays, and switching loses nothing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, Rprop

import gradsync
from gradsync.comm import Group, run_local
from gradsync.comm.shuffle import GroupSchedule, Round, grid, together
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.devices.streams import HostMoment
from gradsync.engine.engine import Engine
from gradsync.frontends.mean_model import take_mean_state
from gradsync.planner import AveragingPlanner, CompressingPlanner
from gradsync.planner.search.job import Job
from gradsync.planner.search.ways import Constraints
from gradsync.plans.plan import What
from gradsync.tuning.auto import AutoPlanner
from tests.frontends.models import Branches, Perceptron
from tests.quick import quickly
from tests.world import Ranks

World = Callable[[int], Ranks]
SCHEDULES = {2: GroupSchedule((Round(((0,), (1,))), *together(2).rounds)), 4: grid((2, 2))}
STEPS = 60


class Clock:
    """A clock by which steps with averaged parameters take so many times as long."""

    def __init__(self, handle: Callable[[], gradsync.Attachment], slower: float) -> None:
        self._handle, self._slower, self._now_s = handle, slower, 0.0

    def moment(self) -> HostMoment:
        self._now_s += 1.0 if self._handle().plan.what is What.GRADIENT else self._slower
        return HostMoment(self._now_s)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def same_everywhere(model: nn.Module) -> bool:
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    dist.broadcast(first := mine.clone(), 0)
    return torch.equal(first, mine)


def attached(
    planner: AutoPlanner, slower: float, patch: pytest.MonkeyPatch
) -> tuple[nn.Module, SGD, gradsync.Attachment]:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.01)
    handle = gradsync.attach(model, optimizer, planner, timeout=20)
    clock = Clock(lambda: handle, slower)
    patch.setattr(Engine, "moment", lambda engine: clock.moment())
    return model, optimizer, handle


@quickly()
def chosen(slower: float) -> tuple[str, bool, float]:
    """Returns the kind that stays, whether ranks agree after a consensus, and the distance from plain training."""
    size, rank = dist.get_world_size(), dist.get_rank()
    averaging = AveragingPlanner(schedule=SCHEDULES[size], momentum_every=1)
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer, handle = attached(AutoPlanner(averaging=averaging, steps=3, warmup=2), slower, patch)
        twin = copy.deepcopy(model)
        together_optimizer = SGD(twin.parameters(), lr=0.01)
        seen: list[What] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            together_optimizer.zero_grad()
            sum(twin(batch(step, each)).square().mean() / size for each in range(size)).backward()
            together_optimizer.step()
            if not seen or seen[-1] is not handle.plan.what:
                seen.append(handle.plan.what)
        assert handle.settled and seen[:2] == [What.GRADIENT, What.PARAMETER], (handle.settled, seen)
        with gradsync.consensus(model):
            mine, theirs = (torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in (model, twin))
            apart = float((mine - theirs).abs().max())
        what, alike = handle.plan.what.value, same_everywhere(model)
        handle.state_dict()
        handle.detach()
        again = gradsync.attach(model)
        again.detach()
    return what, alike, apart


@pytest.mark.parametrize(
    ("slower", "what", "size"),
    [(0.5, "parameter", 2), (0.5, "parameter", 4), (0.99, "gradient", 4), (2.0, "gradient", 2)],
)
def test_the_faster_way_stays(world: World, size: int, slower: float, what: str) -> None:
    for chosen_what, alike, apart in world(size).run(chosen, slower):
        assert chosen_what == what and alike
        assert apart < 1e-2, "learning rates are small: models stay near that of training together"


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "Rprop": lambda model: Rprop(model.parameters(), lr=0.01),
}


class Routed(nn.Module):
    """A model of whose two branches each forward takes one or none, and of a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Branches(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, taken: tuple[int, ...]) -> Tensor:
        return self.inner(x, taken) * self.scale


def state_of(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}'s {key}": torch.as_tensor(kept)
        for name, p in model.named_parameters()
        for key, kept in sorted(optimizer.state[p].items())
    }


@quickly()
def gradients_go_on(kind: str) -> None:
    """Trains on after a trial that parameters have lost, in which rank 0 alone has used a branch."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Routed()
    optimizer = OPTIMIZERS[kind](model)
    averaging = AveragingPlanner(schedule=SCHEDULES[2])
    with pytest.MonkeyPatch.context() as patch:
        handle = gradsync.attach(model, optimizer, AutoPlanner(averaging=averaging, steps=3, warmup=2), timeout=20)
        clock = Clock(lambda: handle, 2.0)
        patch.setattr(Engine, "moment", lambda engine: clock.moment())
        seen: list[What] = []
        while not handle.settled or What.PARAMETER not in seen or handle.plan.what is What.PARAMETER:
            optimizer.zero_grad()
            seen.append(handle.plan.what)
            taken = (1,) if seen[-1] is What.GRADIENT or rank else (0, 1)
            model(batch(len(seen), rank), taken).square().mean().backward()
            optimizer.step()
            assert len(seen) < 200
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step, rank), (0, 1)).square().mean().backward()
            optimizer.step()
        state = state_of(optimizer, model)
        assert "inner.branches.0.weight" in " ".join(state) and "inner.branches.2.weight" not in " ".join(state)
        for name, kept in {**dict(model.named_parameters()), **state}.items():
            dist.broadcast(first := kept.detach().clone(), 0)
            assert torch.equal(first, kept), name
            assert not name.endswith("_sq") or bool((kept >= 0).all()), name
        handle.detach()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_that_go_on_keep_ranks_equal_whatever_the_optimiser_remembers(world: World, kind: str) -> None:
    world(2).run(gradients_go_on, kind)


def state_on(rank: int, optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Gives parameters the state that an optimiser has on this rank."""
    for name in ("full", "scalar", "late"):
        if name != "late" or rank == 1:
            p = parameters[name]
            kept = {"exp_avg": torch.full_like(p, rank + 1.0), "exp_avg_sq": torch.full_like(p, rank + 1.0).square()}
            optimizer.state[p] = {"step": torch.tensor(10.0 - rank), **dict(list(kept.items())[:: 1 - 2 * rank])}
    optimizer.state[parameters["int"]] = {"step": 5 + rank, "weight": 2.0 - rank, "none": None}
    optimizer.state[parameters["list"]] = {"step": 5 + rank, "history": [rank]}
    optimizer.state[parameters["other"]] = {"sum": torch.zeros(2 + rank)}


def test_state_is_averaged_and_counters_are_of_the_rank_with_most_steps() -> None:
    def averaged(group: Group) -> tuple[list[str], list[dict[str, Any]]]:
        names = ("scalar", "other", "list", "late", "int", "full")
        parameters = {n: nn.Parameter(torch.zeros(() if n == "scalar" else (2, 3))) for n in names}
        optimizer = AdamW(parameters.values(), lr=0.1)
        state_on(group.rank, optimizer, parameters)
        apart = take_mean_state(group, optimizer, parameters, 10.0)
        assert not any(p.any() for p in parameters.values()), "weights stay"
        return apart, [optimizer.state[parameters[n]] for n in ("full", "scalar", "late", "int", "list")]

    for rank, (apart, (full, scalar, late, number, listed)) in enumerate(run_local(2, averaged)):
        assert apart == ["list", "other"] and listed == {"step": 5 + rank, "history": [rank]}
        for kept, steps, first, second in ((full, 10, 1.5, 2.5), (scalar, 10, 1.5, 2.5), (late, 9, 1.0, 2.0)):
            assert float(kept["step"]) == steps
            assert bool((kept["exp_avg"] == first).all()) and bool((kept["exp_avg_sq"] == second).all())
        assert number == {"step": 6, "weight": 1.0, "none": None}


@quickly()
def nothing_to_gain() -> list[str]:
    averaging = AveragingPlanner(schedule=together(2))
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer, handle = attached(AutoPlanner(averaging=averaging, steps=3, warmup=2), 0.1, patch)
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            seen.append(handle.plan.what.value)
        assert handle.settled
        handle.detach()
    return seen


def test_all_together_is_not_tried(world: World) -> None:
    for seen in world(2).run(nothing_to_gain):
        assert set(seen) == {"gradient"}


def lossy_plans(job: Job, constraints: Constraints) -> list[gradsync.Plan]:
    (lossy,) = constraints.lossy
    made = CompressingPlanner(lossy)(job.profiles, job.world_size)
    return [made] if isinstance(made, gradsync.Plan) else list(made)


@quickly()
def left_to_be_sent() -> float:
    """Returns the distance of all steps' sum from plain SGD with constant gradients, when averaging begins."""
    size, rank = dist.get_world_size(), dist.get_rank()
    planner = AutoPlanner(
        Constraints((ErrorFeedback(TopK(0.1)),), always=True),
        search=lossy_plans,
        steps=3,
        warmup=2,
        averaging=AveragingPlanner(schedule=SCHEDULES[size]),
    )
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer, handle = attached(planner, 0.5, patch)
        start = [p.detach().clone() for p in model.parameters()]
        factors = [torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)) for p in model.parameters()]
        steps = 0
        while not (handle.settled and handle.plan.what is What.PARAMETER):
            optimizer.zero_grad()
            model(batch(steps, rank))  # only to begin a step
            (sum((p * f).sum() for p, f in zip(model.parameters(), factors, strict=True))).backward()
            optimizer.step()
            steps += 1
            assert steps < 200
        with gradsync.consensus(model):
            moved = [s - p.detach() for s, p in zip(start, model.parameters(), strict=True)]
        worst = 0.0
        for each, factor in zip(moved, factors, strict=True):
            dist.all_reduce(mean := factor / size)
            worst = max(worst, float((each / (0.01 * steps) - mean).abs().sum()))
        handle.detach()
    return worst


def test_what_compressors_left_is_sent_before_parameters_are_averaged(world: World) -> None:
    assert max(world(2).run(left_to_be_sent)) < 1e-4


def stepped(model: nn.Module, optimizer: Optimizer, step: int, *args: Any) -> None:
    optimizer.zero_grad()
    model(batch(step, dist.get_rank()), *args).square().mean().backward()
    optimizer.step()


def tried(handle: gradsync.Attachment, slower: float, patch: pytest.MonkeyPatch) -> None:
    """Lets steps with averaged parameters take so many times as long."""
    clock = Clock(lambda: handle, slower)
    patch.setattr(Engine, "moment", lambda engine: clock.moment())


@quickly()
def residuals_of_a_branch_at_rest() -> tuple[set[str], float]:
    """Lets a branch rest while residuals are to be sent; returns the kinds of plans seen, and the largest residual."""
    torch.manual_seed(0)
    model = Routed()
    optimizer = SGD(model.parameters(), lr=0.01)
    planner = AutoPlanner(
        Constraints((ErrorFeedback(TopK(0.1)),), always=True),
        search=lossy_plans,
        steps=3,
        warmup=2,
        averaging=AveragingPlanner(schedule=SCHEDULES[2]),
    )
    with pytest.MonkeyPatch.context() as patch:
        handle = gradsync.attach(model, optimizer, planner, timeout=20)
        tried(handle, 0.5, patch)
        seen: list[str] = []
        while not handle.settled:
            is_lossy = any(run.scheme.traits.lossy for run in handle._engine.bucket_runs)
            stepped(model, optimizer, len(seen), (0,) if is_lossy and handle._engine.settled else (0, 1))
            seen.append(handle.plan.what.value)
            assert len(seen) < 200
        stepped(model, optimizer, 0, (0,))
        kept = [v for k, v in handle.state_dict()["state"].items() if "branches.1" in k and k.endswith(".residual")]
        handle.detach()
    return set(seen), float(torch.cat(kept).abs().max())


def test_averages_are_not_tried_while_residuals_cannot_be_sent(world: World) -> None:
    for seen, residual in world(2).run(residuals_of_a_branch_at_rest):
        assert seen == {"gradient"} and residual > 0


@quickly()
def residuals_for_parameters() -> tuple[list[str], float]:
    """Loads residuals of gradients where parameters are averaged; returns errors, and how far weights moved."""
    said, moved = [], 0.0
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, optimizer, CompressingPlanner(ErrorFeedback(TopK(0.1))), timeout=10)
    for step in range(3):
        stepped(model, optimizer, step)
    state = handle.state_dict()
    handle.detach()
    handle = gradsync.attach(model, optimizer, AveragingPlanner(schedule=together(2)), timeout=10)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        handle.load_state_dict(state)
    except ValueError as error:
        said.append(str(error))
    handle.load_state_dict(state, strict=False)
    optimizer.param_groups[0]["lr"] = 0.0
    stepped(model, optimizer, 3)
    handle.wait()
    for p, was in zip(model.parameters(), before, strict=True):
        moved = max([moved, *(p.detach() - was).abs().flatten().tolist()])
    handle.detach()
    return said, moved


def test_residuals_of_gradients_are_not_added_to_parameters(world: World) -> None:
    for said, moved in world(2).run(residuals_for_parameters):
        assert len(said) == 1 and "has no place for the state" in said[0] and "strict=False" in said[0]
        assert moved < 1e-6


@quickly()
def accumulates(early: bool, slower: float) -> tuple[set[int], set[int], str]:
    """Returns how often gradients were exchanged per step with averaged gradients and parameters, and what stays."""
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.01)
    averaging = AveragingPlanner(schedule=SCHEDULES[2], early=early)
    with pytest.MonkeyPatch.context() as patch:
        handle = gradsync.attach(model, optimizer, AutoPlanner(averaging=averaging, steps=3, warmup=2), timeout=10)
        tried(handle, slower, patch)
        engine, counts = handle._engine, {What.GRADIENT: set(), What.PARAMETER: set(), What.EARLY_PARAMETER: set()}
        micro = 2 + dist.get_rank()  # trials begin and end in the first forward, inside `no_sync`
        for step in range(STEPS):
            optimizer.zero_grad()
            before = engine.step
            for part in range(micro):
                with handle.no_sync() if part < micro - 1 else nullcontext():
                    model(batch(10 * step + part, dist.get_rank())).square().mean().backward()
            optimizer.step()
            counts[handle.plan.what].add(engine.step - before)
        assert handle.settled
        handle.detach()
    return counts[What.GRADIENT], counts[What.PARAMETER] | counts[What.EARLY_PARAMETER], handle.plan.what.value


@pytest.mark.parametrize(("early", "slower", "what"), [(False, 2.0, "gradient"), (True, 0.5, "early_parameter")])
def test_trials_begin_and_end_inside_no_sync(world: World, early: bool, slower: float, what: str) -> None:
    for found in world(2).run(accumulates, early, slower):
        assert found == ({1}, {0}, what)


@quickly()
def joined(after: int) -> tuple[set[str], str]:
    """Trains `after` steps, then with uneven inputs; returns the kinds of plans seen before, and what stays."""
    averaging = AveragingPlanner(schedule=SCHEDULES[2])
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer, handle = attached(AutoPlanner(averaging=averaging, steps=3, warmup=2), 2.0, patch)
        seen, step = set(), 0
        while step < after or (after and handle.plan.what is What.GRADIENT):
            stepped(model, optimizer, step)
            seen.add(handle.plan.what.value)
            step += 1
            assert step < 200
        with handle.join():
            for more in range(40 - 25 * dist.get_rank()):
                stepped(model, optimizer, 1000 + more)
        assert same_everywhere(model)
        for more in range(3):
            stepped(model, optimizer, 2000 + more)
        assert same_everywhere(model), (handle.settled, handle.plan.what)
        assert handle._switch.choice is not None and handle._switch.choice.made
        what = handle.plan.what.value
        handle.detach()
    return seen, what


@pytest.mark.parametrize("after", [0, 20])
def test_uneven_inputs_keep_gradients_averaged(world: World, after: int) -> None:
    for seen, what in world(2).run(joined, after):
        assert what == "gradient" and ("parameter" in seen) == bool(after)


class Own(SGD):
    """An optimiser that is not known to treat elements one by one."""


def second_optimizer(model: Perceptron) -> list[Optimizer]:
    return [SGD(model.layers[0].parameters(), lr=0.01), Adam(model.layers[2].parameters(), lr=0.01)]


def subclass(model: Perceptron) -> list[Optimizer]:
    return [Own(model.parameters(), lr=0.01)]


def frozen_for_now(model: Perceptron) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.01)]


@quickly()
def declines(make: Callable[[Perceptron], list[Optimizer]]) -> tuple[set[str], list[str]]:
    """Trains a job whose parameters should not be averaged; returns the kinds of plans seen, and what was logged."""
    torch.manual_seed(0)
    model, said = Perceptron(), []
    optimizers = make(model)
    averaging = AveragingPlanner(schedule=SCHEDULES[2], early=make is subclass)
    logging.getLogger("gradsync").setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("gradsync.frontends.switching"), "info", lambda text, *a: said.append(text % a))
        planner = AutoPlanner(averaging=averaging, steps=3, warmup=2)
        handle = gradsync.attach(model, optimizers[0], planner, timeout=10)
        tried(handle, 0.5, patch)
        model.layers[2].requires_grad_(make is not frozen_for_now)
        seen: list[str] = []
        while not handle.settled:
            model.zero_grad()
            model(batch(len(seen), dist.get_rank())).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            seen.append(handle.plan.what.value)
            assert len(seen) < 200
        model.layers[2].requires_grad_(True)
        stepped(model, optimizers[0], 0)
        assert same_everywhere(model)
        handle.detach()
    return set(seen), said


@pytest.mark.parametrize(
    ("make", "why"), [(second_optimizer, "without"), (subclass, "got Own"), (frozen_for_now, "is frozen at present")]
)
def test_averages_are_not_tried_where_they_would_harm(
    world: World, make: Callable[[Perceptron], list[Optimizer]], why: str
) -> None:
    for seen, said in world(2).run(declines, make):
        assert seen == {"gradient"} and len(said) == 1 and why in said[0]


@quickly()
def detached_in_a_trial() -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        averaging = AveragingPlanner(schedule=SCHEDULES[2])
        model, optimizer, handle = attached(AutoPlanner(averaging=averaging, steps=3, warmup=2), 2.0, patch)
        logger = logging.getLogger("gradsync.frontends.attach")
        patch.setattr(logger, "warning", lambda text, *a: said.append(text % a))
        step = 0
        while handle.plan.what is What.GRADIENT:
            stepped(model, optimizer, step)
            step += 1
            assert step < 200
        handle.detach()
        handle.detach()
    return said


def test_detach_says_that_a_trial_left_the_ranks_apart(world: World) -> None:
    for said in world(2).run(detached_in_a_trial):
        assert len(said) == 1 and "handle.settled" in said[0]


@quickly()
def refused() -> list[str]:
    model, said = Perceptron(), []
    for planner, given in ((AutoPlanner(averaging=AveragingPlanner()), None),):
        try:
            gradsync.attach(model, given, planner, timeout=10)
        except ValueError as error:
            said.append(str(error))
    return said


def test_averages_need_the_optimiser(world: World) -> None:
    for said in world(2).run(refused):
        assert len(said) == 1 and "optimizer=...) must name it" in said[0]
