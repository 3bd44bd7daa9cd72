"""Every method synchronises gradients or parameters: exact ones equal DDP's, lossy ones are close."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gradsync.schemes import Scheme
from gradsync_lab.bench import automatic
from gradsync_lab.bench.automatic import AUTOMATIC
from gradsync_lab.bench.methods import METHODS, SWEEPS, TORCH_SPARSE, method
from gradsync_lab.bench.shards import mesh, put_into_shards
from tests.quick import quickly
from tests.world import Ranks, new_oracle_group

ROWS, WIDTH, STEPS = 40, 8, 4  # PowerSGD compresses from its third step on

AVERAGING = (
    "ds_sync",
    "ds_sync_g2_m0",
    "local_sgd1",
    "gossip_ring",
    "one_peer_exponential",
)  # parameters, not gradients

# Largest difference from DDP's gradients over the largest gradient: half an ulp of 8 and of 11 bits for the rank's
# value and again for the sum; 8 bits have one scale for all tensors; PowerSGD keeps a rank and feeds the rest back.
LOSSY = {
    "ddp_bf16": 2**-7, "ddp_sparse_bf16": 2**-7, "bf16": 2**-7, "ddp_fp16": 2**-9, "fp16": 2**-9, "ddp_int8": 2**-6,
    **dict.fromkeys(SWEEPS["ddp_16bit"], 2**-7),
}  # fmt: skip


class Tiny(nn.Module):
    """A model of a table, a layer and a bias."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.layer(self.table(rows)).pow(2).sum()
        return out


def gradients(model: nn.Module, inner: nn.Module) -> dict[str, Tensor]:
    """Returns dense gradients after the last of a few steps; each rank trains on its own rows."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model.zero_grad()
        model(torch.randint(ROWS, (6,), generator=generator)).backward()
    return {name: p.grad.to_dense() for name, p in inner.named_parameters() if p.grad is not None}


@quickly()
def differences(name: str) -> tuple[float, list[bool], bool]:
    """Returns the largest relative difference from DDP, which gradients are sparse, and whether all ranks are equal."""
    expected = gradients(DistributedDataParallel(reference := Tiny(sparse=False)), reference)
    inner = Tiny(sparse=method(name).sparse)
    torch_sparse = patch.object(dist, "new_group", return_value=new_oracle_group())
    with torch_sparse if name in TORCH_SPARSE else nullcontext():
        optimizer = SGD(inner.parameters(), lr=0.1)
        wrapped, attachment = method(name).wrap(inner, optimizer, timedelta(seconds=20))
    found = gradients(wrapped, inner)
    assert found.keys() == expected.keys()
    layouts = [p.grad is not None and p.grad.layout is torch.sparse_coo for p in inner.parameters()]
    if attachment is not None:
        attachment.detach()
    alike = True
    for gradient in found.values():
        first = gradient.clone()
        dist.broadcast(first, 0)
        alike &= torch.equal(first, gradient)
    worst = max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())
    return worst, layouts, alike


@quickly()
def averaged(name: str) -> bool:
    """Whether all ranks have the same parameters after steps on different gradients."""
    inner = Tiny(sparse=method(name).sparse)
    optimizer = SGD(inner.parameters(), lr=0.1)
    _, attachment = method(name).wrap(inner, optimizer, timedelta(seconds=20))
    gradients(inner, inner)
    optimizer.step()
    assert attachment is not None
    attachment.detach()
    mine = torch.cat([p.detach().reshape(-1) for p in inner.parameters()])
    dist.broadcast(first := mine.clone(), 0)
    return torch.equal(first, mine)


@pytest.mark.parametrize("name", AVERAGING)
def test_method_averages_parameters(name: str, world: Callable[[int], Ranks]) -> None:
    assert all(world(2).run(averaged, name)), "both are one group"


IN_SHARDS = [name for name, way in METHODS.items() if way.sharding is not None]
WHOLE = [name for name in METHODS if name not in IN_SHARDS]


@pytest.mark.parametrize("name", [*WHOLE, "hierarchical", "hierarchical1"])
def test_method_synchronises(name: str, world: Callable[[int], Ranks]) -> None:
    for worst, layouts, alike in world(2).run(differences, name):
        assert alike
        assert layouts == [method(name).sparse, False, False]
        if method(name).exact:
            assert worst < 1e-6
        elif name in AUTOMATIC:
            assert worst < 1e-6, "so far the job is being measured"
        elif name in ("sign", "signum"):  # votes of two ranks
            assert worst > 0
        elif name in LOSSY:
            assert 0 < worst < LOSSY[name]
        elif name.startswith("csc"):
            assert worst < 1e-6, "no tensor is as large as a chunk"
        else:
            assert "powersgd" in name and worst < STEPS, "what earlier steps left comes on top"
            assert (worst > 0) is (name != "powersgd4"), "8 x 8 numbers are fewer than those of its factors"


def in_shards(name: str) -> float:
    """Returns the largest relative difference from DDP's gradients, on two nodes of two shards each."""
    expected = gradients(DistributedDataParallel(reference := Tiny(sparse=False)), reference)
    inner, way = Tiny(sparse=False), method(name)
    assert way.sharding is not None and not way.sparse
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        put_into_shards(inner, way.sharding)
    wrapped, attachment = way.wrap(inner, SGD(inner.parameters(), lr=0.1), timedelta(seconds=20))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        wrapped.zero_grad()
        wrapped(torch.randint(ROWS, (6,), generator=generator)).backward()
    found = {name: p.grad.full_tensor() for name, p in inner.named_parameters()}
    if attachment is not None:
        attachment.detach()
    mesh.cache_clear()
    return max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())


@pytest.mark.parametrize(
    "name",
    [
        *IN_SHARDS,
        "sharded_gradsync",
        "sharded_int8",
        "sharded_auto",
        "bf16_sharded_gradsync",
        "fsdp_reduce_bf16",
        "fsdp_reduce_int8",
    ],
)
def test_method_synchronises_models_in_shards(name: str, world: Callable[[int], Ranks]) -> None:
    for off in world(4).run(in_shards, name):
        assert off < 1e-6 if method(name).exact else 0 < off < 2**-5


def test_a_search_for_models_in_shards_leaves_out_what_these_cannot_have() -> None:
    planner = automatic.in_shards(AUTOMATIC["auto_lossy"].planner, 4)
    assert planner.averaging is None
    lossy = planner.constraints.lossy
    assert len(lossy) > 1 and not any(isinstance(each, Scheme) and each.traits.freezes for each in lossy)
    wrap = method("sharded_auto_lossy").wrap
    assert isinstance(wrap, partial) and wrap.args[0].func is automatic.in_shards


@pytest.mark.parametrize("name", ["ddp_default", "ds_sync", "asp", "hsdp", "ddp_bf16"])
def test_other_methods_than_gradsync_s_are_not_for_shards(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} does not exchange gradients by gradsync"):
        method(f"sharded_{name}")


def test_a_reduce_scatter_takes_compressors_without_error_feedback() -> None:
    with pytest.raises(ValueError, match=r"fsdp_reduce_topk0\.01: a reduce-scatter keeps no residual; use bf16, "):
        method("fsdp_reduce_topk0.01")
    with pytest.raises(ValueError, match="unknown compressor 'nonsense'"):
        method("fsdp_reduce_nonsense")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("topk", "unknown method 'topk'; there are gradsync, .* compressors: .*topk0.01"),
        ("0.01", "unknown method '0.01'"),
        ("topk0.01_no_no_feedback", "unknown method"),
        ("topk7", r"TopK.ratio must be in \(0, 1\], got 7"),
    ],
)
def test_unknown_names_and_wrong_numbers_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method(name)


def test_methods_with_compressors_keep_tables_sparse_and_are_lossy() -> None:
    for name in ("topk0.01", "bf16"):
        assert method(name).sparse and not method(name).exact
    assert method("bf16") is METHODS["bf16"]


def test_the_best_line_of_ddp_is_one_of_all_sizes_with_views_without_and_with_a_static_graph() -> None:
    assert len(SWEEPS["ddp"]) == 4 * 3 and len(SWEEPS["ddp_sparse"]) == 2 * 3
    assert {"ddp_default", "ddp_1mb", "ddp_one_bucket_views", "ddp_100mb_static"} < set(SWEEPS["ddp"])
    assert {"ddp_sparse_default", "ddp_sparse_views", "ddp_sparse_1mb_static"} < set(SWEEPS["ddp_sparse"])
    lines = {name: method(name).wrap.keywords for name in SWEEPS["ddp"]}
    assert len({tuple(sorted(settings.items())) for settings in lines.values()}) == len(lines), "no two are alike"
    assert lines["ddp_1mb_static"] == {"bucket_mb": 1, "views": True, "static": True}
