"""Trains tables that TorchRec shards below a network that gradsync synchronises; "exact" as argument: whole gradients.

torchrun --nproc-per-node 2 examples/frameworks/torchrec_tables.py
"""

import hashlib
import logging
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.torchrec import GradsyncWrapper
from gradsync.planner import CompressingPlanner

KINDS, ITEMS = ("films", "books", "songs"), 1000  # of each kind; a user has chosen 4


class Recommender(nn.Module):
    """Tells from what users have chosen whether they are among the quarter that likes a thing."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(ITEMS, 16, name=f"table of {k}", feature_names=[k]) for k in KINDS]
        )
        self.network = nn.Sequential(nn.Linear(16 * len(KINDS), 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, chosen: KeyedJaggedTensor) -> torch.Tensor:
        return self.network(self.tables(chosen).values()).squeeze(1)


def users(number: int, seed: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    items = torch.randint(0, ITEMS, (len(KINDS), number, 4), generator=torch.Generator().manual_seed(seed))
    lengths = torch.full((len(KINDS) * number,), 4)
    chosen = KeyedJaggedTensor.from_lengths_sync(keys=list(KINDS), values=items.flatten(), lengths=lengths)
    return chosen, (items < 300).float().mean(dim=(0, 2)).ge(0.4).float()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # TorchRec warns on the CPU
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    recommender = Recommender()
    _apply_optimizer_in_backward(torch.optim.Adagrad, recommender.tables.parameters(), {"lr": 0.1})
    planner = CompressingPlanner(ErrorFeedback(TopK(0.1)), exact=("*.bias",), matrices_only=True)
    arguments = {} if "exact" in sys.argv else {"plan": planner}
    model = DistributedModelParallel(recommender, data_parallel_wrapper=GradsyncWrapper(**arguments))
    network = [parameter for name, parameter in model.named_parameters() if name.startswith("network.")]
    optimizer = torch.optim.SGD(network, lr=0.03, momentum=0.9)
    for step in range(400):
        chosen, liked = users(64, seed=1_000_000 * dist.get_rank() + step)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(chosen), liked).backward()
        nn.utils.clip_grad_norm_(network, 0.5)
        optimizer.step()

    chosen, liked = users(4096, seed=10**9)
    loss = nn.functional.binary_cross_entropy_with_logits(model(chosen), liked).item()
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in network)
    if dist.get_rank() == 0:
        print("\n".join(handle.explain() if (handle := gradsync.attachment_of(model)) else []))
        print(f"held-out loss {loss:.4f}, parameters {hashlib.sha256(content).hexdigest()[:12]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
