"""Momentum is applied once, by the compressor or by the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.compressors import (
    Biased,
    Compressor,
    CompressorState,
    ErrorFeedback,
    Law,
    Message,
    Signum,
    TopK,
    dgc,
    register,
)
from gradsync.optim.lars import LARS
from gradsync.optim.momentum import MomentumCheck, take_momentum
from gradsync.schemes import (
    AllReduce,
    CompressedAllGather,
    CompressedTwoWay,
    Hierarchical,
    MajorityVote,
    ReduceScatter,
    Scheme,
    Sparsified,
)
from gradsync.tensors.bucket import FlatSpec, TensorSpec
from gradsync.tensors.density import ParameterProfile
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]


def settings_of(optimizer: torch.optim.Optimizer, name: str) -> dict[int, Any]:
    """Returns {id(parameter): the setting `name`}."""
    return {id(p): group[name] for group in optimizer.param_groups for p in group["params"]}


def sgd(parameters: Any, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **settings})


def test_momentum_is_taken_from_the_parameters_that_are_named() -> None:
    layer = nn.Linear(3, 2)
    optimizer = sgd(layer.parameters(), weight_decay=0.01)
    assert take_momentum(optimizer, [layer.weight]) == 0.9
    assert settings_of(optimizer, "momentum") == {id(layer.weight): 0.0, id(layer.bias): 0.9}
    assert settings_of(optimizer, "weight_decay")[id(layer.weight)] == 0.01
    assert take_momentum(optimizer, [layer.weight]) == take_momentum(optimizer, []) == 0
    assert len(optimizer.param_groups) == 2


def test_the_momentum_of_nesterov_is_taken_as_any() -> None:
    layer = nn.Linear(3, 2)
    optimizer = sgd(layer.parameters(), nesterov=True)
    assert take_momentum(optimizer, [layer.weight]) == 0.9
    assert settings_of(optimizer, "nesterov") == {id(layer.weight): False, id(layer.bias): True}


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adagrad,
        torch.optim.Adam,
        partial(torch.optim.RMSprop, momentum=0.9),  # of scaled gradients
    ],
)
def test_momentum_is_taken_from_sgd_only(make: Callable[..., torch.optim.Optimizer]) -> None:
    layer = nn.Linear(3, 2)
    optimizer = make(layer.parameters())
    before = optimizer.state_dict()
    assert take_momentum(optimizer, layer.parameters()) == 0
    assert optimizer.state_dict() == before


def test_names_of_parameters_go_with_them() -> None:
    layer = nn.Linear(3, 2)
    optimizer = sgd(layer.named_parameters())
    take_momentum(optimizer, [layer.weight])
    assert [group["param_names"] for group in optimizer.param_groups] == [["bias"], ["weight"]]
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        [id(layer.bias)],
        [id(layer.weight)],
    ]


def test_momenta_that_differ_are_refused_before_anything_has_changed() -> None:
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizer = sgd([{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "momentum": 0.5}])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"momenta of 0\.5, 0\.9 in the optimiser, and one was expected: take that"):
        take_momentum(optimizer, [layer.weight for layer in layers])
    assert optimizer.state_dict() == before
    assert [take_momentum(optimizer, [layer.weight]) for layer in layers] == [0.9, 0.5]


def test_dampening_is_refused() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="dampening, which compressors' momentum has not"):
        take_momentum(sgd(layer.parameters(), dampening=0.5), [layer.weight])


def test_groups_of_a_scheduler_stay_as_many() -> None:
    layer = nn.Linear(3, 2)
    optimizer = sgd([{"params": [layer.weight]}, {"params": [layer.bias]}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    take_momentum(optimizer, [layer.weight])  # a group as it is
    optimizer.step()
    scheduler.step()
    assert settings_of(optimizer, "momentum") == {id(layer.weight): 0.0, id(layer.bias): 0.9}
    assert list(settings_of(optimizer, "lr").values()) == pytest.approx([0.01, 0.01])
    optimizer = sgd(layer.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="a scheduler was made for the optimiser's 1 parameter groups, and 1 of them"):
        take_momentum(optimizer, [layer.weight])
    assert optimizer.state_dict() == before


def test_what_had_gathered_goes_with_the_momentum() -> None:
    layer = nn.Linear(3, 2)
    optimizer = sgd(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    take_momentum(optimizer, [layer.weight])
    assert "momentum_buffer" not in optimizer.state[layer.weight]
    assert optimizer.state[layer.bias]["momentum_buffer"].all()


DGC = dgc(0.1, momentum=0.8)


@pytest.mark.parametrize(
    "scheme",
    [
        CompressedAllGather(DGC),
        Sparsified(DGC),
        CompressedTwoWay(ErrorFeedback(TopK(0.1)), sums=DGC),
        Hierarchical(ReduceScatter(), CompressedAllGather(DGC), 2),
    ],
    ids=lambda scheme: scheme.title,
)
def test_momentum_is_found_wherever_a_scheme_has_it(scheme: Scheme[Any]) -> None:
    layer = nn.Linear(3, 2)
    parameters = dict(layer.named_parameters())
    plan = plan_of(layer, scheme)
    optimizer = sgd(layer.parameters())
    check = MomentumCheck(parameters).check
    with pytest.raises(
        ValueError, match=r"'weight' travels under MomentumCorrection, .* 0.8 .* would apply 0.9 on top"
    ):
        check(plan, optimizer)
    take_momentum(optimizer, [layer.weight])
    check(plan, optimizer)


@register
@dataclass(frozen=True)
class LocalMomentum(Compressor[Message]):
    """A user's own compressor, by inheritance from nothing that gradsync knows to have momentum."""

    momentum: float = 0.9

    def law(self, spec: FlatSpec) -> Law:
        return Biased("a test")

    def compress(self, x: Tensor, state: CompressorState) -> tuple[Message, CompressorState]:
        raise NotImplementedError

    def decompress(self, payload: Message) -> Tensor:
        raise NotImplementedError

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return 4 * spec.numel


@register
@dataclass(frozen=True)
class LocalMomentumExchange(AllReduce):
    """A user's own scheme."""

    momentum: float = 0.9


@pytest.mark.parametrize(
    ("scheme", "found"),
    [
        (CompressedAllGather(LocalMomentum(0.8)), "LocalMomentum, .* 0.8 .* would apply 0.9 on top"),
        (CompressedAllGather(ErrorFeedback(LocalMomentum(0.8))), "LocalMomentum, .* 0.8 "),
        (LocalMomentumExchange(momentum=0.7), "LocalMomentumExchange, .* 0.7 "),
        (CompressedAllGather(LocalMomentum(0.0)), None),
        (LocalMomentumExchange(momentum=0.0), None),
    ],
    ids=str,
)
def test_so_is_the_momentum_of_what_users_have_written(scheme: Scheme[Any], found: str | None) -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=found) if found else nullcontext():
        MomentumCheck(dict(layer.named_parameters())).check(plan_of(layer, scheme), sgd(layer.parameters()))


def plan_of(layer: nn.Linear, scheme: Scheme[Any]) -> Plan:
    specs = {name: TensorSpec.of(p) for name, p in layer.named_parameters()}
    return Plan.make(specs, 4, [(["weight"], scheme), (["bias"], AllReduce())])


@pytest.mark.parametrize(
    ("scheme", "make", "refused"),
    [
        (CompressedAllGather(DGC), torch.optim.Adam, "MomentumCorrection, .* 0.8 .* would apply 0.9 on top"),
        (CompressedAllGather(DGC), torch.optim.NAdam, "MomentumCorrection, .* would apply 0.9"),
        (
            CompressedAllGather(DGC),
            partial(torch.optim.RMSprop, momentum=0.5),
            "MomentumCorrection, .* would apply 0.5",
        ),
        (CompressedAllGather(DGC), partial(LARS, lr=0.1), "MomentumCorrection, .* would apply 0.9"),
        (MajorityVote(Signum(0.7)), sgd, "Signum, .* 0.7 .* would apply 0.9"),
        (CompressedAllGather(DGC), partial(torch.optim.Adam, betas=(0.0, 0.999)), None),
        (CompressedAllGather(DGC), torch.optim.RMSprop, None),
        (CompressedAllGather(DGC), torch.optim.Adagrad, None),
        (CompressedAllGather(dgc(0.1, momentum=0.0)), sgd, None),
        (CompressedAllGather(ErrorFeedback(TopK(0.1))), sgd, None),
        (MajorityVote(Signum(0.0)), sgd, None),
    ],
)
def test_one_momentum_is_applied_whoever_has_it(
    scheme: Scheme[Any], make: Callable[..., torch.optim.Optimizer], refused: str | None
) -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        MomentumCheck(dict(layer.named_parameters())).check(plan_of(layer, scheme), make(layer.parameters()))


def corrected(profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
    """Returns a plan that compresses matrices by DGC."""
    specs = {p.name: p.tensor for p in profiles}
    matrices = [name for name, spec in specs.items() if len(spec.shape) > 1]
    others = [name for name in specs if name not in matrices]
    return Plan.make(specs, world_size, [(matrices, CompressedAllGather(DGC)), (others, AllReduce())])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()


def refused_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns the error of a refused step, after checking that parameters stay unchanged."""
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="the optimiser would apply") as error:
        step(model, optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    return str(error.value)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() > 1]


def refusals_of_two_momenta() -> list[str]:
    texts, model = [], Perceptron()
    optimizer = sgd(model.parameters())
    with pytest.raises(ValueError, match="the optimiser would apply") as error:
        gradsync.attach(model, optimizer, plan=corrected, timeout=10)
    texts.append(str(error.value))
    handle = gradsync.attach(model, plan=corrected, timeout=10)  # which does not know the optimiser
    texts.append(refused_step(model, optimizer))
    handle.detach()
    take_momentum(optimizer, matrices_of(model))
    handle = gradsync.attach(model, optimizer, plan=corrected, timeout=10)
    for _ in range(3):
        step(model, optimizer)
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    texts.append(refused_step(model, optimizer))
    handle.detach()
    return texts


def test_momentum_of_a_compressor_and_of_the_optimizer_are_refused_before_anything_is_applied(world: World) -> None:
    for texts in world(2).run(refusals_of_two_momenta):
        assert len(texts) == 3
        assert all("has a momentum of 0.8 on each rank, and the optimiser would apply 0.9" in text for text in texts)


def refusals_behind_ddp() -> list[str]:
    model = DistributedDataParallel(Perceptron())
    state = gradsync.DDPState(model, plan=corrected, timeout_s=10)
    model.register_comm_hook(state, gradsync.ddp_hook)
    optimizer = sgd(model.parameters())
    texts = [refused_step(model, optimizer)]
    state.detach()
    step(model, optimizer)  # nothing is compressed any more
    model = DistributedDataParallel(Perceptron())
    model.register_comm_hook(gradsync.DDPState(model, plan=corrected, timeout_s=10), gradsync.ddp_hook)
    optimizer = sgd(model.parameters())
    take_momentum(optimizer, matrices_of(model))
    step(model, optimizer)
    return texts


def test_two_momenta_are_refused_behind_ddp_too(world: World) -> None:
    for (text,) in world(2).run(refusals_behind_ddp):
        assert "has a momentum of 0.8 on each rank, and the optimiser would apply 0.9" in text


def refusal_of_a_cycle() -> str:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    handle = gradsync.attach(model, optimizer, plan=corrected, timeout=10)
    step(model, optimizer)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    text = refused_step(model, optimizer)
    handle.detach()
    return text


def test_momentum_that_a_scheduler_brings_later_is_refused(world: World) -> None:
    for text in world(2).run(refusal_of_a_cycle):
        assert "would apply 0.95 on top of it" in text and "cycle_momentum=False" in text


def refusal_on_one_rank() -> str:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    handle = gradsync.attach(model, optimizer, plan=corrected, timeout=60)
    step(model, optimizer)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["momentum"] = 0.9
        return refused_step(model, optimizer)
    step(model, optimizer)
    with pytest.raises(RuntimeError, match="would apply 0.9 on top of it") as error:
        step(model, optimizer)  # for which the other one does not come
    handle.detach()
    return str(error.value)


def test_the_other_ranks_are_told_of_what_one_alone_refuses(world: World) -> None:
    for text in world(2).run(refusal_on_one_rank):
        assert "would apply 0.9 on top of it" in text
