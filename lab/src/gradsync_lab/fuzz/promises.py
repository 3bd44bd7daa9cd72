"""Promises of schemes, read from their settings: what is conserved, how values are rounded, which bytes are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Transfer, transfers
from gradsync.schemes import Scheme
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec, trainable_parameters
from gradsync.tensors.density import DensityProfile, profile_rows, profile_tables

from .case import Case
from .models import FuzzModel

SPREAD = 0.5  # share by which bytes may differ from the predicted ones where they depend on more than mean densities
HEADS_BYTES = 256  # of a message: headers, and the alignment of sections, for each tensor
LONG_MESSAGE = 1 << 16  # elements; schemes that carry messages may switch formats with the length
HALVES = ("bfloat16", "float16")


def conserves(expression: Mapping[str, Any]) -> bool:
    """Whether what the scheme does not send stays in residuals, so that nothing is lost but rounding."""
    ((name, settings),) = expression.items()
    match name:
        case "powersgd":
            return True
        case "coarse_grained":
            return bool(settings["momentum"] == 0 and settings["history"] == 1)
        case "compressed_two_way":
            return _feeds_back(settings["compressor"]) and (settings["sums"] is None or _feeds_back(settings["sums"]))
        case "compressed_all_reduce" | "compressed_all_gather" | "sparsified" | "route":
            return settings["compressor"] is not None and _feeds_back(settings["compressor"])
        case "half_precision":
            return conserves(settings["inner"])
        case "hierarchical":
            return conserves(settings["inter"])
    return False


def _feeds_back(expression: Mapping[str, Any]) -> bool:
    return "error_feedback" in expression


def promised_eps(expression: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Returns the distance of 1 to the next number of the coarsest element type that values travel in."""
    return max(info.eps for info in _types(expression, dtype))


def promised_spacing(expression: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Returns the distance of 0 to the next number, the largest one of the element types that values travel in."""
    return max(info.smallest_normal * info.eps for info in _types(expression, dtype))


def _types(expression: Mapping[str, Any], dtype: torch.dtype) -> list[torch.finfo]:
    words = set(_words(expression))
    return [torch.finfo(each) for each in (dtype, *(getattr(torch, half) for half in HALVES if half in words))]


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _words(each)
    elif isinstance(value, list):
        for each in value:
            yield from _words(each)
    elif isinstance(value, str):
        yield value


def mixing(expression: Mapping[str, Any], size: int, step: int) -> Tensor:
    """Returns the matrix by which a round of a mixing scheme changes the ranks' parameters, (size, size) float64."""
    ((name, settings),) = expression.items()
    matrix = torch.zeros(size, size, dtype=torch.float64)
    if name == "gossip":
        distances = settings["distances"][step % len(settings["distances"])]
        origins = {distance % size for distance in distances} | {0}
        for rank in range(size):
            for distance in origins:
                matrix[rank, (rank - distance) % size] = 1 / len(origins)
        return matrix
    number = step % len(settings["rounds"])
    for place, group in enumerate(settings["rounds"][number]):
        share = settings["relaxations"][number][place] if settings["relaxations"] else 1.0
        for rank in group:
            matrix[rank, rank] += 1 - share
            matrix[rank, group] += share / len(group)
    return matrix


# Bytes.


@lru_cache(maxsize=64)
def _specs(case: Case) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(p) for name, p in trainable_parameters(FuzzModel(case)).items()}


@lru_cache(maxsize=64)
def _bucket_of(case: Case, number: int) -> tuple[Scheme[Any], Bucket, Placement]:
    assert case.buckets is not None
    planned, specs = case.buckets[number], _specs(case)
    scheme = planned.made
    segments = tuple(Segment(*each) for each in planned.segments)
    tensors, traits = tuple(specs[s.name] for s in segments), scheme.traits
    bucket = Bucket(str(number), segments, tensors, traits.layout, traits.carries_flags)
    return scheme, bucket, Placement.regular(case.size // case.ranks_per_node, case.ranks_per_node)


@lru_cache(maxsize=64)
def bytes_follow_data(case: Case, number: int) -> bool:
    """Whether the bytes of a bucket depend on how many of its rows or elements are not zero."""
    scheme, bucket, placement = _bucket_of(case, number)
    if bucket.layout is Layout.ROWS or _follows(scheme, bucket.specs, placement):
        return True
    _, *carriers = _inside(scheme)
    messages = (bucket.specs, (TensorSpec((LONG_MESSAGE,), bucket.specs[0].dtype),))  # padded to whole chunks, perhaps
    return any(_follows(each, specs, placement) for each in carriers for specs in messages)


def _inside(scheme: Scheme[Any]) -> Iterator[Scheme[Any]]:
    """Yields a scheme and those that carry its messages, of which it predicts the mean density only."""
    yield scheme
    for name in ("scheme", "inner", "intra", "inter"):
        carrier = getattr(scheme, name, None)
        if isinstance(carrier, Scheme):
            yield from _inside(carrier)


def _follows(scheme: Scheme[Any], specs: tuple[TensorSpec, ...], placement: Placement) -> bool:
    numel = specs[0].numel
    densities = [(DensityProfile(numel, rows),) for rows in (0.0, numel / 3, float(numel))]
    try:
        told = {_by_rank(_planned(scheme, specs, placement, known), placement.size) for known in densities}
    except ValueError:  # an inner scheme for other ranks than all, whose bytes are in those of the outer one
        return False
    return len(told) > 1


def _by_rank(planned: Sequence[Transfer], size: int) -> tuple[float, ...]:
    return tuple(sum(each.sent_bytes(rank) for each in planned) for rank in range(size))


def _planned(
    scheme: Scheme[Any],
    specs: tuple[TensorSpec, ...],
    placement: Placement,
    known: tuple[DensityProfile, ...],
    step: int = 0,
) -> list[Transfer]:
    return transfers(scheme.steps(specs, known, placement, step))


def expected_bytes(
    case: Case, number: int, brought: Sequence[Sequence[Tensor | None]], step: int
) -> tuple[float, float]:
    """Returns the fewest and the most bytes that all ranks may send in a step for what each brings to a bucket."""
    scheme, bucket, placement = _bucket_of(case, number)
    of_rows = bucket.layout is Layout.ROWS
    fewest, known = (
        _rows(bucket, brought) if of_rows else _elements(bucket, brought, getattr(scheme, "block", 1), flags)
        for flags in (0.0, 1.0)
    )
    planned = _planned(scheme, bucket.specs, placement, known, step)
    least = sum(_by_rank(_planned(scheme, bucket.specs, placement, fewest, step), case.size))
    total = sum(_by_rank(planned, case.size))
    # The densest rank may decide for all that a dense exchange pays.
    densest = tuple(map(_of_densest, known))
    most = max(total, sum(_by_rank(_planned(scheme, bucket.specs, placement, densest, step), case.size)))
    pairs = case.size * (case.size - 1)
    heads = HEADS_BYTES * pairs * (len(bucket.segments) + 1) * max(len(planned), 1)
    carried = len(list(_inside(scheme))) > 1  # a message that another scheme made may be empty, or full of residuals
    if carried:
        full = tuple(DensityProfile(each.num_rows, float(each.num_rows)) for each in known)
        most = max(most, sum(_by_rank(_planned(scheme, bucket.specs, placement, full, step), case.size)))
    return 0.0 if carried else (1 - SPREAD) * min(least, total) - heads, (1 + SPREAD) * most + heads


def _of_densest(known: DensityProfile) -> DensityProfile:
    """Returns the profile in which all ranks have as many rows as the rank with most has."""
    rows = max(known.rows, known.most_rows)
    growth = {ranks: max(known.union_rows(ranks) / rows, 1.0) for ranks in known.densification if rows}
    return replace(known, rows=rows, densification=growth)


def _rows(bucket: Bucket, brought: Sequence[Sequence[Tensor | None]]) -> tuple[DensityProfile, ...]:
    def rows(gradient: Tensor | None, spec: TensorSpec) -> Tensor:
        if gradient is None or not gradient.numel():
            return torch.empty(0, dtype=torch.int64)
        return gradient.view(spec.num_rows, -1).any(dim=1).nonzero().flatten()

    columns = zip(*brought, strict=True)
    return profile_tables(
        [(spec.num_rows, [rows(g, spec) for g in column]) for spec, column in zip(bucket.tensors, columns, strict=True)]
    )


def _elements(
    bucket: Bucket, brought: Sequence[Sequence[Tensor | None]], block: int, flag: float
) -> tuple[DensityProfile, ...]:
    """Returns the profile of a flat bucket's elements, and of its blocks of `block` elements; all flags are `flag`."""
    zeros = [torch.zeros(segment.numel) for segment in bucket.segments]
    flat = [torch.cat([z if g is None else g for z, g in zip(zeros, each, strict=True)]) for each in brought]
    flags = torch.full((bucket.specs[0].numel - bucket.numel,), flag)
    found = [torch.cat([x, flags]).nonzero().flatten() for x in flat]
    numel = bucket.specs[0].numel
    blocks = {block: profile_rows([each // block for each in found], -(-numel // block))}
    return (replace(profile_rows(found, numel), blocks=blocks),)
