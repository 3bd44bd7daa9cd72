"""Names of compressors mean what records say they mean, and methods make plans of them."""

from __future__ import annotations

import pytest
import torch

from gradsync.compressors import ErrorFeedback, TopK
from gradsync.compressors import names as compressors
from gradsync.compressors.names import named, usual_names
from gradsync.planner import default_plan
from gradsync.planner.default.named import fit_optimizer, lossy_planner
from gradsync.schemes import AllReduce, HalfPrecision
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import ParameterProfile

PROFILES = [
    ParameterProfile(name, TensorSpec(shape, dtype), sparse)
    for name, shape, dtype, sparse in (
        ("table", (1000, 8), torch.float32, True),
        ("weight", (64, 32), torch.float32, False),
        ("bias", (32,), torch.float32, False),
        ("phase", (8, 8), torch.complex64, False),
        ("gain", (), torch.float32, False),
    )
]


def test_a_name_tells_ratio_and_feedback() -> None:
    assert named("topk0.05").trained == named("topk0.05_feedback").trained == ErrorFeedback(TopK(0.05))
    assert named("topk0.05").bare == named("topk0.05_no_feedback").trained == TopK(0.05)
    for name in usual_names():
        assert (named(name).trained != named(name).bare) == (named(name).family.feedback is True)


def test_momentum_moves_from_the_optimizer_into_a_method_that_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def make(ratio: float, momentum: float) -> TopK:
        asked.append(momentum)
        return TopK(ratio)

    family = compressors.Family(make, feedback=None, numbers=(0.5,), matrices_only=True, asks=("momentum",))
    monkeypatch.setitem(compressors.FAMILIES, "corrected", family)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    assert fit_optimizer("topk0.5", optimizer) == fit_optimizer("bf16", optimizer) == 0.0
    assert fit_optimizer("corrected0.5", optimizer) == 0.9
    momenta = {id(p): group["momentum"] for group in optimizer.param_groups for p in group["params"]}
    assert momenta == {id(layer.weight): 0.0, id(layer.bias): 0.9}
    assert fit_optimizer("corrected0.5", torch.optim.Adagrad(layer.parameters())) == 0.0
    lossy_planner("corrected0.5", 0.9)(PROFILES, 4)
    assert asked[-1] == 0.9
    with pytest.raises(ValueError, match="has a residual of its own: there is no .*, use"):
        named("corrected0.5_no_feedback")


@pytest.mark.parametrize(("name", "momentum"), [("sign", 0.9), ("signum", 0.0)])
def test_sgd_takes_small_steps_by_votes(name: str, momentum: float) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)
    assert fit_optimizer(name, optimizer) == 0.0
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (pytest.approx(0.001), momentum)


def test_signum_is_the_only_momentum_of_adam() -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    assert fit_optimizer("signum", optimizer) == 0.0
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"]) == (0.1, (0.0, 0.999))


def test_what_sums_is_made_for_the_ranks_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    family = compressors.Family(lambda summands: TopK(1 / summands), feedback=True, asks=("summands",))
    monkeypatch.setitem(compressors.FAMILIES, "of_ranks", family)
    (scheme,) = [b.scheme for b in lossy_planner("of_ranks")(PROFILES, 4).buckets if "weight" in b.names]
    assert scheme.compressor == ErrorFeedback(TopK(0.25))


def test_dense_floating_buckets_are_compressed_and_no_others() -> None:
    plan = lossy_planner("topk0.01")(PROFILES, 4)
    plan.check({p.name: p.tensor for p in PROFILES}, 4)
    schemes = {name: bucket.scheme for bucket in plan.buckets for name in bucket.names}
    default = {name: bucket.scheme for bucket in default_plan(PROFILES, 4).buckets for name in bucket.names}
    assert schemes["table"] == default["table"] and schemes["phase"] == default["phase"] == AllReduce()
    assert schemes["weight"] == schemes["bias"] == schemes["gain"]
    assert schemes["weight"].compressor == ErrorFeedback(TopK(0.01))
    halves = lossy_planner("bf16")(PROFILES, 4)
    assert [b.scheme for b in halves.buckets if "weight" in b.names] == [HalfPrecision()]


def test_what_is_for_matrices_leaves_the_others_exact() -> None:
    plan = lossy_planner("dgc0.01", 0.9)(PROFILES, 4)
    plan.check({p.name: p.tensor for p in PROFILES}, 4)
    assert {tuple(sorted(b.names)) for b in plan.buckets if b.scheme == AllReduce()} >= {("bias", "gain")}
    (compressed,) = [b.names for b in plan.buckets if "weight" in b.names]
    assert compressed == ["weight"]


@pytest.mark.parametrize("name", [*usual_names(), "topk0.3"])
@pytest.mark.parametrize("size", [2, 4, 64])
def test_every_name_makes_a_plan(name: str, size: int) -> None:
    lossy_planner(name)(PROFILES, size).check({p.name: p.tensor for p in PROFILES}, size)
