"""Networks for images have the promised number of tensors, repeatable steps, and learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradsync.optim.lars import LARS
from gradsync_lab.workloads import AlexNetWorkload, ResNet8, ResNet20, ResNet32, load
from gradsync_lab.workloads.convolutional import AlexNet, ImageWorkload, ResNet
from lab.tests.workloads.training import opened, train

KINDS = [ResNet8, ResNet20, ResNet32, AlexNetWorkload]
NETWORKS = [ResNet8, AlexNetWorkload]


def small(kind: type[ImageWorkload], **options: Any) -> ImageWorkload:
    return opened(kind, **{"data": "digits", "batch_size": 16, **options})


@pytest.mark.parametrize(
    ("kind", "num_tensors", "num_parameters", "largest_ratio"),
    [
        (ResNet8, 29, 77_754, 0.474),
        (ResNet20, 65, 272_186, 0.135),
        (ResNet32, 101, 466_618, 0.079),
        (AlexNetWorkload, 10, 2_143_242, 0.978),
    ],
)
def test_the_networks_have_the_tensors_and_parameters_they_say_all_with_gradients(
    kind: type[ImageWorkload], num_tensors: int, num_parameters: int, largest_ratio: float
) -> None:
    workload = small(kind)
    model = workload.model(sparse=True)
    workload.loss(model, next(workload.batches(0, 1, seed=0))).backward()
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert (len(sizes), sum(sizes)) == (num_tensors, num_parameters)
    assert max(sizes) / sum(sizes) == pytest.approx(largest_ratio, abs=0.001)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert f"{num_parameters / 1e6:.3f} M parameters ({num_tensors} dense tensors, " in workload.describe()


def test_the_parameters_do_not_depend_on_the_images() -> None:
    for large, little in ((ResNet(8, 2), ResNet(8, 1)), (AlexNet(2), AlexNet(1))):
        shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (large, little)]
        assert shapes[0] == shapes[1]
        assert large(torch.zeros(2, 1, 28, 28)).shape == little(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("kind", NETWORKS)
def test_weights_are_the_seeds_and_the_callers_random_state_is_left_alone(kind: type[ImageWorkload]) -> None:
    workload = small(kind)
    before = torch.get_rng_state()
    one, same, other = (workload.model(sparse=False, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    first, second, third = (nn.utils.parameters_to_vector(model.parameters()) for model in (one, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_step_can_be_repeated_bit_for_bit(kind: type[ImageWorkload]) -> None:
    """Running statistics move with each training forward, which must not change the step."""
    workload = small(kind)
    model = workload.model(sparse=False)
    batch = next(workload.batches(0, 1, seed=0))
    losses, gradients = [], []
    for _ in range(2):
        model.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            nn.utils.parameters_to_vector([p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
    assert losses[0] == losses[1]
    assert torch.equal(gradients[0], gradients[1])


def test_evaluation_covers_the_held_out_images_and_leaves_weights_statistics_and_modes_as_they_were() -> None:
    workload = small(ResNet8)
    model = workload.model(sparse=False)
    frozen = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    result = workload.evaluate(model)
    assert [module.training for module in model.modules()] == modes
    assert model.training and not frozen.training
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    held_out = workload.batch(np.arange(workload.num_train, workload.num_samples))
    model.eval()
    with torch.no_grad():
        assert result["loss"] == pytest.approx(float(workload.loss(model, held_out)), rel=1e-4)
        right = (model(held_out[0]).argmax(dim=1) == held_out[1]).double().mean()
    assert result["accuracy"] == pytest.approx(float(right))


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_networks_learn_the_digits(kind: type[ImageWorkload]) -> None:
    workload = small(kind, batch_size=32)
    model, losses = train(workload, 40, sparse=False)
    assert max(losses) < 3  # no blow-up of the first steps; ten classes by chance: 2.3
    assert np.mean(losses[-10:]) < 0.6
    assert workload.evaluate(model)["accuracy"] > 0.8


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_networks_learn_the_digits_in_large_batches_by_lars(kind: type[ImageWorkload]) -> None:
    workload = small(kind, batch_size=256, lars=0.1, warmup_steps=10, decay_steps=60)
    model, losses = train(workload, 40, sparse=False)
    assert max(losses) < 3
    assert workload.evaluate(model)["accuracy"] > 0.8
    optimizer = workload.optimizer(model)
    assert isinstance(optimizer, LARS)
    assert {name: optimizer.param_groups[0][name] for name in ("trust", "warmup_steps", "decay_steps")} == {
        "trust": workload.trust,
        "warmup_steps": 10,
        "decay_steps": 60,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lars": -1.0}, "lars must be finite and not negative, got -1.0"),
        ({"lars": 1.0, "warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
        ({"warmup_steps": 5}, "warmup_steps are of LARS: give its learning rate"),
        ({"decay_steps": 5}, "decay_steps are of LARS: give its learning rate"),
        ({"lars": 1.0, "trust": 0.0}, "trust must be positive and finite, got 0.0"),
    ],
)
def test_updates_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("alexnet", data="digits", **options)


def test_generated_images_are_refused() -> None:
    with pytest.raises(ValueError, match="data must be fashion-mnist, digits or any, got 'zipf'"):
        load("alexnet", data="zipf")
