"""Models whose parameters move, are replaced for a call, or have unusual classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import gradsync
from gradsync.planner import AveragingPlanner
from tests.frontends.test_beyond_ddp import compare_with_mean
from tests.frontends.twins import Twin, assert_same_on_all_ranks, compare_with_ddp, detach, follow, make_twins
from tests.world import Ranks

World = Callable[[int], Ranks]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


def trains_with_a_change(change: Callable[[nn.Module], object], *, at: int = 2) -> None:
    """Compares with DDP while `change(model)` is called before step `at`."""

    def step(twin: Twin, number: int) -> None:
        if number == at:
            with warnings.catch_warnings(action="ignore"):  # torch's advice to take a newer function
                change(twin.module)
        twin.optimizer.zero_grad()
        twin.model(torch.randn(8, 4)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(layers, step, steps=5)


def pruned() -> None:
    trains_with_a_change(lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5))


def pruned_for_good() -> None:
    def change(model: nn.Module) -> None:
        prune.l1_unstructured(model[3], "weight", amount=0.5)
        prune.remove(model[3], "weight")

    trains_with_a_change(change)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def averages_with_a_change(change: Callable[[nn.Module], object]) -> None:
    """Averages parameters, where DDP loses its hook: a parametrisation's `set_` makes a new accumulation node."""

    def backward(model: nn.Module, number: int) -> None:
        if number == 2:
            with torch.random.fork_rng():
                torch.manual_seed(5)
                change(model)
        model(torch.randn(8, 4)).square().mean().backward()

    compare_with_mean(layers, backward, steps=5)


def parametrised() -> None:
    averages_with_a_change(lambda model: parametrize.register_parametrization(model[0], "weight", Doubled()))


def orthogonal() -> None:
    averages_with_a_change(lambda model: parametrizations.orthogonal(model[0]))


def spectral() -> None:
    averages_with_a_change(lambda model: parametrizations.spectral_norm(model[0]))


def old_spectral() -> None:
    trains_with_a_change(lambda model: nn.utils.spectral_norm(model[0]))


def a_parameter_that_moves_to_another_module() -> None:
    def change(model: nn.Module) -> None:
        head = model[3]
        model[3] = nn.Sequential(nn.Linear(6, 1), nn.Identity())
        model[3][0].weight, model[3][0].bias = head.weight, head.bias

    trains_with_a_change(change)


def called_functionally() -> None:
    """Calls the model with tensors made of its parameters, and in some calls with unrelated tensors."""

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        prefix = "module." if twin.model is not twin.module else ""
        replaced = {prefix + n: p * 2 for n, p in twin.module.named_parameters() if number != 1 or n.startswith("0")}
        functional_call(twin.model, replaced, (torch.randn(8, 4),)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(layers, step)


def other_weights_for_a_call() -> None:
    """Calls the model with a teacher's parameters: a local computation; training continues."""
    twins = make_twins(layers)
    torch.manual_seed(5)
    teacher = dict(layers().named_parameters())

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        if twin.handle is not None and number > 0:
            twin.module.eval()  # what normalisation has seen stays
            functional_call(twin.module, teacher, (torch.ones(8, 4),)).sum()
            twin.module.train()
        twin.model(torch.randn(8, 4)).square().mean().backward()
        twin.optimizer.step()

    follow(twins, step, steps=4)
    detach(twins)


def transforms_of_functions() -> None:
    """Computes gradients by sample and ensembles with their own buffers, between two steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model.register_buffer("scale", torch.full((1,), 1.0 + dist.get_rank()))
    handle = gradsync.attach(model, timeout=10)
    parameters = dict(model.named_parameters())

    def loss(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(model, tensors, (x,)).sum()
        return result

    for _ in range(2):
        model.zero_grad()
        by_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, torch.ones(4, 3))
        torch.testing.assert_close(by_sample["weight"], torch.ones(4, 1, 3))
        ensemble = {**{n: torch.stack([p, 2 * p]) for n, p in parameters.items()}, "scale": torch.ones(2, 1)}
        assert vmap(loss, in_dims=(0, None))(ensemble, torch.ones(3)).shape == (2,)
        model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 0.5))
        assert float(model.scale) == 1.0
    handle.detach()


def compiled_by(compile_: Callable[[nn.Module], nn.Module]) -> None:
    """Compiles a model with normalisation to TorchScript: its buffers are rank 0's, too."""

    def make() -> nn.Module:
        with warnings.catch_warnings(action="ignore"):  # torch's, that TorchScript is deprecated
            return compile_(layers())

    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        if number == 1:
            with twin.no_sync():
                twin.model(torch.randn(8, 4)).square().mean().backward()
        (twin.model(torch.randn(8, 4)) - twin.model(torch.randn(8, 4)).square()).mean().backward()
        twin.optimizer.step()

    # Beside weights also running means: those of rank 0 in every forward.
    compare_with_ddp(make, step, find_unused_parameters=False)


def traced(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.trace(model, torch.ones(8, 4), check_trace=False)
    return made


def loaded(model: nn.Module) -> nn.Module:
    """Returns the model as loaded from a file: parameters of a plain tensor class."""
    import io

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    made: nn.Module = torch.jit.load(file)
    return made


def scripted() -> None:
    compiled_by(torch.jit.script)


def traced_model() -> None:
    compiled_by(traced)


def loaded_model() -> None:
    compiled_by(loaded)


def exact_names_that_look_like_patterns() -> None:
    model = nn.ModuleDict({"x[0]": nn.Linear(4, 4), "y*": nn.Linear(4, 4)})
    handle = gradsync.attach(model, timeout=10, exclude=["x[0].weight", "y*.bias"])
    assert sorted(name for bucket in handle.plan.buckets for name in bucket.names) == ["x[0].bias", "y*.weight"]
    handle.detach()


CASES = [
    pruned,
    pruned_for_good,
    parametrised,
    orthogonal,
    spectral,
    old_spectral,
    a_parameter_that_moves_to_another_module,
    called_functionally,
    other_weights_for_a_call,
    transforms_of_functions,
    scripted,
    traced_model,
    loaded_model,
    exact_names_that_look_like_patterns,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case)


def refused_after(change: Callable[[nn.Module], object]) -> str:
    model = layers()
    handle = gradsync.attach(model, timeout=10)
    model(torch.randn(8, 4)).sum().backward()
    with warnings.catch_warnings(action="ignore"):
        change(model)
    try:
        model(torch.randn(8, 4)).sum().backward()
    except RuntimeError as error:
        handle.detach()
        again = gradsync.attach(model, timeout=10)
        model.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        assert_same_on_all_ranks({n: p.grad for n, p in model.named_parameters()})
        again.detach()
        return str(error)
    return "nothing was raised"


def weight_norm() -> str:
    return refused_after(lambda model: parametrizations.weight_norm(model[0]))


def old_weight_norm() -> str:
    return refused_after(lambda model: nn.utils.weight_norm(model[0]))


def new_weight() -> str:
    return refused_after(lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(6, 4))))


def scripted_by_a_plan_of_parameters() -> str:
    with warnings.catch_warnings(action="ignore"):
        model = torch.jit.script(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        gradsync.attach(model, optimizer, AveragingPlanner(), timeout=10)
    except ValueError as error:
        gradsync.attach(model, timeout=10).detach()
        return str(error)
    return "nothing was raised"


def test_plans_of_parameters_refuse_torchscript(world: World) -> None:
    for said in world(2).run(scripted_by_a_plan_of_parameters):
        assert "TorchScript does not have" in said and "average gradients" in said, said


@pytest.mark.parametrize("function", [weight_norm, old_weight_norm, new_weight])
def test_parameters_that_others_take_the_place_of_are_refused(world: World, function: Callable[[], str]) -> None:
    for said in world(2).run(function):
        assert "a parameter of the model was replaced after gradsync was attached" in said, said


def without_values(kind: str) -> str:
    """Attaches a model with a lazy or meta tensor, also a frozen one, as attach broadcasts all; returns the error."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    name = "1.weight"
    if kind == "lazy":
        model[1] = nn.LazyLinear(3)
    elif kind == "frozen lazy":
        model[1] = nn.LazyLinear(3)
        model[1].weight.requires_grad = False
    elif kind == "lazy buffer":
        model[1], name = nn.LazyBatchNorm1d(affine=False), "1.running_mean"
    elif kind == "meta":
        model[1].to("meta")
    elif kind == "sparse":
        model[1].weight = nn.Parameter(torch.eye(3).to_sparse())
    try:
        gradsync.attach(model, timeout=10)
    except (RuntimeError, ValueError) as error:
        assert repr(name) in str(error), str(error)
        gradsync.attach(model, timeout=10, exclude=["1.*"]).detach()
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("lazy", ["not initialised yet", "run a forward"]),
        ("frozen lazy", ["not initialised yet", "run a forward"]),
        ("lazy buffer", ["not initialised yet", "run a forward"]),
        ("meta", ["meta device", "to_empty(device=...)"]),
        ("sparse", ["sparse parameter", "make it dense"]),
    ],
)
def test_parameters_without_values_are_refused_with_what_to_do(world: World, kind: str, texts: list[str]) -> None:
    for said in world(2).run(without_values, kind):
        assert all(text in said for text in texts), said


def test_names_are_matched_as_names_and_as_patterns() -> None:
    from gradsync.tensors.bucket import matches

    for name, pattern in (("x[0].weight", "x[0].weight"), ("a.b", "a.*"), ("a?", "a?")):
        assert matches(name, [pattern]), (name, pattern)
    assert not matches("x[0].weight", ["x[0].bias"])
    assert partial(matches, "b")(["a", "b"])
