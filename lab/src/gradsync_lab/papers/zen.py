"""The communication that Zen measured (Wang et al., OSDI 2025), from the `steps` of its schemes and gradsync's.

The cluster has 16 nodes of 8 ranks. Inside a node a dense reduce-scatter comes first, so that each rank has an eighth
of the tensor at the density of its node's sum; language models are cut over the node's ranks instead. Simulated are
bytes on a node's link, at line rate, and latency; hashing, sums and links inside nodes are not. The paper prints
curves, not tables: published values are those that its text quotes, and densities that it does not state are assumed
here. SparCML's partial sums of 16-bit values count as float32, as gradsync sends them, which costs SparCML 29 % more
bytes than its own pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel
from gradsync.costs.steps import transfers
from gradsync.schemes import (
    BLOCKS_OF_256,
    Aggregation,
    AllReduce,
    BalancedParallelism,
    ElementPoint,
    Partition,
    Point,
    Scheme,
)
from gradsync.schemes import Communication as Way
from gradsync.schemes.points import DOUBLING_OF_ELEMENTS, PARAMETER_SERVER_OF_ELEMENTS
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import DensityProfile
from gradsync.tensors.index_formats import IndexFormat

from ..rivals.zen_hash import ZenHash

NODES, RANKS_PER_NODE = 16, 8
RATES_BYTES_PER_S = {"25 Gbps": 25e9 / 8, "100 Gbps": 100e9 / 8}
PUBLISHED_RATE = "25 Gbps"  # the rate for which the paper quotes communication alone
ALPHA_S = 20e-6  # latency of a message between nodes: assumed
FIRST_OF_EIGHT = 0.6  # share of the non-zeros in the first of 8 partitions, "more than 60 %" in all of its models
PARTITIONS = 128
BLOCK = 256


@dataclass(frozen=True)
class Model:
    """A model of the paper's evaluation, as its gradient's size and density."""

    name: str
    numel: int  # elements of the sparse tensors
    dtype: torch.dtype
    density: float  # of data sent between nodes: a node's sum, or one rank's part of a language model
    final_density: float  # density of the sum over all nodes
    row_length: int | None  # of an embedding, whose rows are zero as a whole; None: elements are zero independently
    block_density: float | None  # share of non-zero blocks of 256 elements; None: as for evenly distributed rows
    assumed: str  # assumptions where the paper gives no figure
    published: dict[str, str] = field(default_factory=dict)  # at 25 Gbps, over dense; by scheme


MODELS = (
    Model(
        "LSTM",
        406_000_000,
        torch.float32,
        0.03,
        0.08,
        512,
        None,
        "3 % after a node's sum, 8 % finally, rows of 512",
        {"zen": "6.77", "omnireduce": "<= 1.58"},
    ),
    Model(
        "DeepFM",
        214_000_000,
        torch.float32,
        0.052,
        0.12,
        16,
        None,
        "12 % finally, rows of 16",
        {"zen": "2.10", "omnireduce": "<= 1.58"},
    ),
    Model(
        "NMT",
        112_000_000,
        torch.float32,
        0.0247 * 8**0.663,
        0.615,
        512,
        None,
        "gamma^n = n^0.663 from 2.47 % and 61.5 % at 128 ranks, rows of 512",
        {"omnireduce": "<= 1.58"},
    ),
    *(
        Model(
            name,
            numel,
            torch.bfloat16,
            0.05,
            0.2,
            None,
            0.3,
            "top 5 % in bfloat16, gamma^16 = 4, 30 % of all blocks of 256",
            {**zen, "omnireduce": "<= 1.58"},
        )
        for name, numel, zen in (
            ("Llama3.2-3B", 3_210_000_000, {}),
            ("OPT-2.7B", 2_650_000_000, {"zen": "3.44"}),
            ("Gemma2-2B", 2_610_000_000, {"zen": "3.51"}),
        )
    ),
)

_LISTS = {"push_format": IndexFormat.LIST.value, "pull_format": IndexFormat.LIST.value}
_GATHER = Point(Way.POINT_TO_POINT, Aggregation.ONE_SHOT, Partition.CENTRALIZATION)


@dataclass(frozen=True)
class Communication:
    """The simulated bytes and seconds of exchanging one model's gradient by one scheme, at one rate of the links."""

    model: str
    rate: str
    scheme: str
    nbytes: float  # on the busiest link direction of a node
    seconds: float
    speedup: float  # over the dense all-reduce
    published: str | None


def zen_table() -> list[Communication]:
    """Returns bytes and seconds of exchanges by the paper's and gradsync's schemes, by model and rate; dense first."""
    return [row for model in MODELS for row in _rows(model)]


def _rows(model: Model) -> Iterator[Communication]:
    placement = Placement.one_per_node(NODES)
    steps = {name: s.steps((spec,), (profile,), placement) for name, (s, spec, profile) in _schemes(model).items()}
    for rate, bytes_per_s in RATES_BYTES_PER_S.items():
        # The ranks of a node share its link, each with its own part of the tensor.
        cost = CostModel(ALPHA_S, bytes_per_s / RANKS_PER_NODE, memory_bytes_per_s=math.inf)
        dense_s = cost.total_s(steps["dense"])
        for name, each in steps.items():
            nbytes = RANKS_PER_NODE * sum(transfer.busiest_bytes for transfer in transfers(each))
            published = model.published.get(name) if rate == PUBLISHED_RATE else None
            seconds = cost.total_s(each)
            yield Communication(model.name, rate, name, nbytes, seconds, dense_s / seconds, published)


def _schemes(model: Model) -> dict[str, tuple[Scheme[Any], TensorSpec, DensityProfile]]:
    """Returns schemes by name ("zen", ...), each with the shape of the tensor that it takes and counts of non-zeros."""
    numel = model.numel // RANKS_PER_NODE
    flat, elements = TensorSpec((numel,), model.dtype), _profile(model, numel, BLOCK)
    rivals: dict[str, Scheme[Any]] = {
        "dense": AllReduce(),
        "agsparse": ElementPoint.at(_GATHER, **_LISTS),
        "sparcml": _with(DOUBLING_OF_ELEMENTS, _LISTS),
        "sparse ps": _with(PARAMETER_SERVER_OF_ELEMENTS, _LISTS),
        "omnireduce": _with(BLOCKS_OF_256, _LISTS),
        "zen": ZenHash(),
    }
    schemes = {name: (scheme, flat, elements) for name, scheme in rivals.items()}
    if model.row_length is None:
        return {**schemes, "gradsync": (ElementPoint(), flat, elements)}
    rows = numel // model.row_length
    table = TensorSpec((rows, model.row_length), model.dtype)
    return {**schemes, "gradsync": (BalancedParallelism(), table, _profile(model, rows))}


def _with(point: ElementPoint, formats: dict[str, str]) -> ElementPoint:
    return ElementPoint.at(point.point, block=point.block, **formats)


def _profile(model: Model, rows: int, block: int | None = None) -> DensityProfile:
    """Returns how many of `rows` rows are non-zero on one rank and in sums over ranks, and how unevenly they lie.

    The first eighth of the rows holds 60 % of the non-zero ones, or as many as fit. With `block`, the result has the
    same figures for blocks of so many elements.
    """
    growth = model.final_density / model.density
    densification = {1 << j: growth ** (j / 4) for j in range(1, 5)}
    shares, union_shares = _shares(model.density), _shares(model.final_density)
    blocks = {block: _in_blocks(model, rows, block)} if block is not None else {}
    return DensityProfile(rows, model.density * rows, densification, "", 0.0, shares, union_shares, blocks)


def _in_blocks(model: Model, numel: int, block: int) -> DensityProfile:
    """Returns the density profile of blocks of `block` elements: how many are non-zero, by number of ranks.

    A block of an embedding holds whole rows or lies within one.
    """
    growth, ranks = model.final_density / model.density, [1, 2, 4, 8, 16]
    if model.block_density is not None:
        touched = {k: min(model.block_density * growth ** (math.log2(k) / 4), 1.0) for k in ranks}
    else:
        parts = max(block // model.row_length, 1) if model.row_length else block
        touched = {k: 1 - (1 - model.density * growth ** (math.log2(k) / 4)) ** parts for k in ranks}
    blocks, first = -(-numel // block), touched[1]
    growths = {k: touched[k] / first for k in ranks[1:]}
    return DensityProfile(blocks, first * blocks, growths, "", 0.0, _shares(first), _shares(touched[16]))


def _shares(density: float) -> tuple[float, ...]:
    """Returns each partition's share of the non-zeros: the first share x of the rows has x^e of the non-zeros.

    The exponent e makes the first eighth hold 60 %. A partition cannot be more than full: non-zeros that do not fit
    move to the next one.
    """
    exponent = math.log(FIRST_OF_EIGHT) / math.log(1 / 8)
    most, carried, shares = 1 / (PARTITIONS * density), 0.0, []
    for i in range(PARTITIONS):
        wanted = carried + ((i + 1) / PARTITIONS) ** exponent - (i / PARTITIONS) ** exponent
        shares.append(min(wanted, most))
        carried = wanted - shares[-1]
    return tuple(shares)
