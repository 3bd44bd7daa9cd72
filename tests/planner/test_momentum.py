"""Momentum is applied once: by the compressor or by the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import Plan
from gradsync.bucket import TensorSpec
from gradsync.compressors import ErrorFeedback, TopK, dgc
from gradsync.density import ParameterProfile
from gradsync.planner import check_momentum, take_momentum
from gradsync.schemes import (
    AllReduce,
    CompressedAllGather,
    CompressedTwoWay,
    Hierarchical,
    ReduceScatter,
    Scheme,
    Sparsified,
)
from tests.engine.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]


def test_momentum_is_taken_from_the_parameters_that_are_named() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    assert take_momentum(optimizer, [layer.weight]) == 0.9
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert (groups[id(layer.weight)]["momentum"], groups[id(layer.bias)]["momentum"]) == (0.0, 0.9)
    assert groups[id(layer.weight)]["weight_decay"] == 0.01
    assert (
        take_momentum(optimizer, [layer.weight]) == take_momentum(torch.optim.Adagrad([layer.bias]), [layer.bias]) == 0
    )
    assert len(optimizer.param_groups) == 2


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
    plan = Plan.make(
        {n: TensorSpec.of(p) for n, p in parameters.items()}, 4, [(["weight"], scheme), (["bias"], AllReduce())]
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(
        ValueError, match=r"'weight' travels under MomentumCorrection, .* 0.8 .* would apply 0.9 on top"
    ):
        check_momentum(plan, parameters, optimizer)
    take_momentum(optimizer, [layer.weight])
    check_momentum(plan, parameters, optimizer)
    check_momentum(plan, parameters, torch.optim.Adam(layer.parameters()))


def corrected(profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
    """Matrices under DGC."""
    specs = {p.name: p.tensor for p in profiles}
    matrices = [name for name, spec in specs.items() if len(spec.shape) > 1]
    others = [name for name in specs if name not in matrices]
    return Plan.make(specs, world_size, [(matrices, CompressedAllGather(DGC)), (others, AllReduce())])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()


def refusals_of_two_momenta() -> list[str]:
    texts, model = [], Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        gradsync.attach(model, optimizer, plan=corrected, timeout=10)
    except ValueError as error:
        texts.append(str(error))
    handle = gradsync.attach(model, plan=corrected, timeout=10)  # which does not know the optimiser
    before = [p.detach().clone() for p in model.parameters()]
    try:
        step(model, optimizer)
    except ValueError as error:
        texts.append(str(error))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    handle.detach()
    take_momentum(optimizer, [p for p in model.parameters() if p.dim() > 1])
    handle = gradsync.attach(model, optimizer, plan=corrected, timeout=10)
    for _ in range(3):
        step(model, optimizer)
    handle.detach()
    return texts


def test_momentum_of_a_compressor_and_of_the_optimizer_are_refused_before_anything_is_applied(world: World) -> None:
    for texts in world(2).run(refusals_of_two_momenta):
        assert len(texts) == 2
        assert all("has a momentum of 0.8 on each rank, and the optimiser would apply 0.9" in text for text in texts)
