"""Trains tables that TorchRec shards, with gradsync for the rest, and prints JSON; `test_torchrec.py` runs it."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.torchrec import GradsyncWrapper
from gradsync.planner import CompressingPlanner

STEPS, INTERRUPTED_AT, BATCH, ITEMS = 8, 4, 16, 100
KINDS = ("t0", "t1", "t2")


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(ITEMS, 16, name=kind, feature_names=[kind]) for kind in KINDS]
        )
        self.network = nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, chosen: KeyedJaggedTensor) -> Tensor:
        return self.network(self.tables(chosen).values()).squeeze(1)


class Training:
    """A model with its optimisers; the tables' own steps inside backward."""

    def __init__(self, wrapper: DataParallelWrapper | None) -> None:
        torch.manual_seed(0)
        model = Recommender()
        sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        how = {"t0": table_wise(rank=0), "t1": row_wise(), "t2": data_parallel()}
        plan = construct_module_sharding_plan(model.tables, how, sharder, local_size=2, world_size=2, device_type="cpu")
        self.model = DistributedModelParallel(
            model, plan=ShardingPlan({"tables": plan}), sharders=[sharder], data_parallel_wrapper=wrapper
        )
        self.network = [p for name, p in self.model.named_parameters() if name.startswith("network.")]
        replicated = [p for name, p in self.model.named_parameters() if "t2" in name]
        self.optimizer = torch.optim.SGD([*self.network, *replicated], lr=0.1, momentum=0.9)

    def run(self, steps: range = range(STEPS)) -> Training:
        for number in steps:
            self.optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(*self.outputs(10 * number + dist.get_rank())).backward()
            nn.utils.clip_grad_norm_(self.network, 0.1)
            self.optimizer.step()
        return self

    def outputs(self, seed: int) -> tuple[Tensor, Tensor]:
        items = torch.randint(0, ITEMS, (len(KINDS), BATCH, 4), generator=torch.Generator().manual_seed(seed))
        lengths = torch.full((len(KINDS) * BATCH,), 4)
        chosen = KeyedJaggedTensor.from_lengths_sync(keys=list(KINDS), values=items.flatten(), lengths=lengths)
        return self.model(chosen), (items.sum(dim=(0, 2)) % 2).float()

    def values(self) -> Tensor:
        """Returns the network's parameters, and this rank's parts of the tables."""
        return torch.cat([p.detach().reshape(-1).clone() for _, p in self.model.named_parameters()])

    def tables(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for _, p in self.model.module.tables.named_parameters()])

    def save(self, folder: str) -> None:
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=f"{folder}/model")
        torch.save(self.optimizer.state_dict(), f"{folder}/optimizer.{dist.get_rank()}")
        attachment(self.model).checkpoint().save(folder)

    def load(self, folder: str, *, residuals: bool = True) -> Training:
        state = {"model": self.model.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/model")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(torch.load(f"{folder}/optimizer.{dist.get_rank()}"))
        if residuals:
            attachment(self.model).checkpoint().load(folder)
        return self


def attachment(model: nn.Module) -> gradsync.Attachment:
    found = gradsync.attachment_of(model)
    assert found is not None
    return found


def lossy() -> CompressingPlanner:
    return CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


def of_all_ranks(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def furthest(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference on any rank."""
    return max(of_all_ranks(float((one - other).abs().max())))


def equal() -> dict[str, Any]:
    theirs, ours = Training(None).run(), Training(GradsyncWrapper()).run()
    handle = attachment(ours.model)
    network = torch.cat([p.detach().reshape(-1) for p in ours.network])
    return {
        "difference": furthest(theirs.values(), ours.values()),
        "moved": furthest(ours.values(), Training(None).values()),
        "apart": max(float((each - network).abs().max()) for each in of_all_ranks(network)),
        "names": sorted(name for bucket in handle.statistics() for name in bucket.names),
        "tables moved": furthest(ours.tables(), Training(None).tables()),
        "keys": ours.model.state_dict().keys() == theirs.model.state_dict().keys(),
        "steps": handle.totals().steps,
    }


def resume() -> dict[str, float]:
    folder = of_all_ranks(tempfile.mkdtemp())[0]
    whole = Training(GradsyncWrapper(plan=lossy()))
    whole.run(range(INTERRUPTED_AT)).save(folder)
    whole.run(range(INTERRUPTED_AT, STEPS))
    rest = range(INTERRUPTED_AT, STEPS)
    again = Training(GradsyncWrapper(plan=lossy())).load(folder).run(rest)
    lost = Training(GradsyncWrapper(plan=lossy())).load(folder, residuals=False).run(rest)
    return {"difference": furthest(whole.values(), again.values()), "lost": furthest(whole.values(), lost.values())}


class Sharded(nn.Module):
    """Has tables only."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(tables=[EmbeddingBagConfig(ITEMS, 16, name="t0", feature_names=["t0"])])


def only_tables() -> bool:
    model = Sharded()
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    how = {"t0": table_wise(rank=0)}
    plan = construct_module_sharding_plan(model.tables, how, sharder, local_size=2, world_size=2, device_type="cpu")
    sharding = ShardingPlan({"tables": plan})
    wrapped = DistributedModelParallel(
        model, plan=sharding, sharders=[sharder], data_parallel_wrapper=GradsyncWrapper()
    )
    return gradsync.attachment_of(wrapped) is None


def bad_input() -> dict[str, list[str]]:
    sys.modules.setdefault("torchft", ModuleType("torchft"))
    of_torchft = type("DistributedDataParallel", (nn.parallel.DistributedDataParallel,), {"__module__": "torchft.ddp"})
    without_group = ShardingEnv(2, dist.get_rank())

    def wrapped(model: nn.Module, env: ShardingEnv | None = None) -> object:
        found = DistributedModelParallel(model, plan=ShardingPlan({}), init_data_parallel=False)
        return GradsyncWrapper().wrap(found, env or found._env, found.device)

    attached, inner = nn.Linear(2, 2), nn.Linear(2, 2)
    gradsync.attach(attached)
    in_torchft = of_torchft(inner)
    cases: dict[str, Callable[[], object]] = {
        "ddp": lambda: wrapped(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
        "ours": lambda: wrapped(gradsync.DistributedDataParallel(nn.Linear(2, 2))),
        "attached": lambda: wrapped(attached),
        "torchft": lambda: wrapped(in_torchft),
        "inside of torchft": lambda: wrapped(inner),
        "no group": lambda: wrapped(nn.Linear(2, 2), without_group),
        "buffers": lambda: GradsyncWrapper(forward_sync_buffers=True),
        "unknown": lambda: DistributedModelParallel(
            nn.Linear(2, 2), plan=ShardingPlan({}), data_parallel_wrapper=GradsyncWrapper(shards=2)
        ),
    }
    return {name: of_all_ranks(error_of(case)) for name, case in cases.items()}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {"equal": equal(), "resume": resume(), "only tables": only_tables(), "bad input": bad_input()}
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found))
    dist.barrier()  # gloo's threads let go of the tensors above, for which they need Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
