"""`topk` has the largest elements of a real gradient and their exact profile, and only exchanges know the workload."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gradsync.characterization.figures import Characterization
from gradsync.cli import app
from gradsync.comm import LocalGroup, drive, run_local
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel
from gradsync.schemes import AllReduce, BalancedElements
from gradsync.tensors.bucket import Layout
from gradsync_lab.bench.options import parse_options
from gradsync_lab.bench.sync import SyncSpec
from gradsync_lab.bench.sync_rank import elements_of_step, schemes_of
from gradsync_lab.bench.topk import TopKWorkload, kind_of, load

SMALL: dict[str, Any] = {"data": "zipf", "batch_size": 2, "dim": 64, "context": 8}
COST = CostModel(alpha_s=1e-4, bandwidth_bytes_per_s=1e8, memory_bytes_per_s=1e10)


def small(**options: Any) -> TopKWorkload:
    workload = load("topk", **{**SMALL, **options})
    assert isinstance(workload, TopKWorkload)
    return workload


def left_on_ranks(size: int) -> list[Tensor]:
    workload = small(feedback_steps=1)
    model = workload.model(sparse=False)
    return [workload.sparsified(model, workload.batches(rank, size, seed=0)) for rank in range(size)]


def test_the_largest_elements_of_all_gradients_are_left_in_the_order_of_the_model() -> None:
    workload = small(ratio=0.02, feedback_steps=0)
    model = workload.model(sparse=False)
    left = workload.sparsified(model, workload.batches(0, 1, seed=0))
    workload.loss(model, next(workload.batches(0, 1, seed=0))).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    k = round(0.02 * len(gradient))
    assert left.count_nonzero() == k
    assert torch.equal(left[left != 0], gradient[left != 0])
    assert left[left != 0].abs().min() >= gradient[left == 0].abs().max()


def test_residuals_of_the_steps_before_are_added() -> None:
    alone, after = small(feedback_steps=0), small(feedback_steps=2)
    model = alone.model(sparse=False)
    batches = list(islice(alone.batches(0, 1, seed=0), 3))
    last, fed_back = alone.sparsified(model, iter(batches[2:])), after.sparsified(model, iter(batches))
    assert last.count_nonzero() == fed_back.count_nonzero() == alone.sparsified(model, iter(batches)).count_nonzero()
    assert fed_back.abs().sum() > 1.05 * last.abs().sum()


def test_ranks_exchange_what_is_left_and_know_its_exact_profile() -> None:
    brought = left_on_ranks(3)

    def rank_main(group: LocalGroup) -> Any:
        found = elements_of_step(brought[group.rank], group)
        results = []
        for scheme in (BalancedElements(), AllReduce()):  # the first one overwrites what the second one begins with
            found.prepare()
            summed, _ = drive(scheme.synchronize(found.x(), {}, group, 1.0), timeout_s=30)
            results.append(summed.clone())
        return found, results

    everyone = torch.stack(brought)
    for found, results in run_local(3, rank_main):
        assert found.layout is Layout.FLAT and list(found.baselines) == ["ddp", "ddp_bf16"]
        assert [spec.numel for spec in found.specs] == [everyone.shape[1]]
        for result in results:
            torch.testing.assert_close(result, everyone.sum(dim=0))
        (profile,) = found.profiles
        blocks = torch.nn.functional.pad(everyone, (0, -everyone.shape[1] % 256)).view(3, -1, 256).any(dim=2)
        for got, hits in ((profile, everyone != 0), (profile.blocks[256], blocks)):
            assert got.num_rows == hits.shape[1]
            assert got.rows == pytest.approx(float(hits.sum()) / 3)
            assert got.union_rows(3) == pytest.approx(float(hits.any(dim=0).sum()))


def test_schemes_for_elements_are_measured_and_one_is_selected() -> None:
    brought = left_on_ranks(4)
    found = run_local(4, lambda group: elements_of_step(brought[group.rank], group))[0]
    arguments = (found.layout, found.specs, found.profiles, Placement.one_per_node(4))
    planned, none = schemes_of(*arguments, SyncSpec(), COST)
    assert (list(planned), none) == (["balanced_elements", "all_reduce"], None)
    everything, selected = schemes_of(*arguments, SyncSpec(schemes="all"), COST)
    assert len(everything) > 18 and all(scheme.traits.layout is Layout.FLAT for scheme in everything.values())
    assert selected in everything and selected != "all_reduce"


def test_the_share_that_is_left_is_an_option_of_exchanges_and_no_workload_is_trained_so() -> None:
    assert parse_options(["topk"], ["ratio=0.05", "dim=64"], kind_of) == {"ratio": 0.05, "dim": 64}
    with pytest.raises(
        ValueError, match=r"TopK.ratio must be in \(0, 1\], got 2.0. Options of topk: .*ratio .float, 0.01"
    ):
        parse_options(["topk"], ["ratio=2"], kind_of)
    with pytest.raises(ValueError, match="feedback_steps must not be negative, got -1"):
        parse_options(["topk"], ["feedback_steps=-1"], kind_of)
    with pytest.raises(ValueError, match="unknown workload 'topq'; expected one of deepfm, .*, topk"):
        parse_options(["topq"], [], kind_of)
    done = CliRunner().invoke(app, ["bench", "train", "--workload", "topk"])
    assert done.exit_code != 0 and "unknown workload 'topk'" in " ".join(done.output.split())


def test_what_is_left_is_characterized_as_one_tensor() -> None:
    options = [word for name, value in SMALL.items() for word in ("--option", f"{name}={value}")]
    command = ["characterize", "--workload", "topk", *options, "--ranks", "2", "--steps", "1", "--json", "-"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    (tensor,) = Characterization.from_json(done.stdout).tensors.values()
    assert tensor.elements.density.mean == pytest.approx(0.01, abs=1e-5)
    assert 0.01 < tensor.elements.union_density[2].value <= 0.02
