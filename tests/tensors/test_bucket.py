"""Buckets are checked data: their parameters have one dtype and one device."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import nn

from gradsync.tensors.bucket import (
    NUM_MARKS,
    Bucket,
    FlatSpec,
    Layout,
    Segment,
    TensorSpec,
    cut_by_bytes,
    model_digest,
    trainable_parameters,
)

WEIGHT = TensorSpec((4, 2, 3), torch.float16)


def test_a_spec_counts_elements_bytes_rows_and_columns() -> None:
    assert TensorSpec.of(torch.zeros(4, 2, 3, dtype=torch.float16)) == WEIGHT
    assert (WEIGHT.numel, WEIGHT.itemsize, WEIGHT.nbytes, WEIGHT.num_rows, WEIGHT.dim) == (24, 2, 48, 4, 6)
    assert str(WEIGHT) == "4x2x3 float16"
    assert str(TensorSpec((), torch.float32)) == "scalar float32"
    assert TensorSpec((), torch.float32).numel == 1


def test_a_flat_bucket_is_one_tensor_with_its_flags() -> None:
    segments = (Segment("w", 6, 24), Segment("b", 0, 3))
    tensors = (WEIGHT, TensorSpec((3,), torch.float16))
    bucket = Bucket("0", segments, tensors, Layout.FLAT)
    assert (bucket.numel, bucket.num_flags, bucket.names, bucket.dtype) == (
        21,
        3 + NUM_MARKS,
        ["w", "b"],
        torch.float16,
    )
    assert bucket.specs == (TensorSpec((24 + NUM_MARKS,), torch.float16),)
    assert Bucket("0", segments, tensors, Layout.FLAT, flags_ride=False).specs == (TensorSpec((21,), torch.float16),)


def test_a_flat_spec_travels_without_what_this_process_worked_out_of_it() -> None:
    spec = FlatSpec((Segment("w", 6, 24), Segment("b", 0, 3)), ((18,), (3,)), torch.float32, salt=1)
    assert (hash(spec), spec.lengths, spec.sections.starts) == (hash(spec), (18, 3), (6, 0))
    for copied in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), replace(spec)):
        assert copied == spec
        assert hash(copied) == hash(spec)
    assert vars(pickle.loads(pickle.dumps(spec))).keys() == {field.name for field in fields(spec)}
    assert replace(spec, salt=2) != spec


def test_a_bucket_of_tables_is_its_tables() -> None:
    bucket = Bucket("0", (Segment("t", 0, 24),), (WEIGHT,), Layout.ROWS)
    assert bucket.specs == (WEIGHT,)


@pytest.mark.parametrize(
    ("segments", "tensors", "layout", "message"),
    [
        ((), (), Layout.FLAT, "needs segments and one tensor spec for each"),
        ((Segment("w", 0, 24),), (), Layout.FLAT, "needs segments and one tensor spec for each"),
        (
            (Segment("w", 0, 24), Segment("v", 0, 3)),
            (WEIGHT, TensorSpec((3,), torch.float32)),
            Layout.FLAT,
            r"bucket '7' mixes dtypes \['torch.float16', 'torch.float32'\]; give each its own bucket",
        ),
        ((Segment("w", 0, 12),), (WEIGHT,), Layout.ROWS, "a row-sparse table is not cut"),
        ((Segment("s", 0, 1),), (TensorSpec((), torch.float32),), Layout.ROWS, "a row-sparse table is not cut"),
    ],
)
def test_what_cannot_travel_together_is_refused(
    segments: tuple[Segment, ...], tensors: tuple[TensorSpec, ...], layout: Layout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Bucket("7", segments, tensors, layout)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 60), st.integers(1, 100))
def test_cuts_are_those_of_ddp(sizes: list[int], first: int, enough: int) -> None:
    tensors = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]
    places, _ = dist._compute_bucket_assignment_by_size(tensors, [first, enough])
    named = [(f"p{i}", nbytes) for i, nbytes in enumerate(sizes)]
    assert cut_by_bytes(named, first, enough) == [[f"p{i}" for i in group] for group in places]


def test_few_bytes_before_a_large_tensor_travel_with_it() -> None:
    named = [("bias", 40), ("weight", 4000), ("next", 60), ("last", 50)]
    assert cut_by_bytes(named, 1000, 100) == [["bias", "weight"], ["next", "last"]]
    assert cut_by_bytes([], 1000, 100) == []


def test_trainable_parameters_leave_frozen_ones_out_and_name_tied_ones_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert list(trainable_parameters(model)) == ["0.weight", "1.bias"]


@pytest.mark.parametrize(
    "other",
    [
        {"v": WEIGHT, "b": TensorSpec((3,), torch.float16)},
        {"w": TensorSpec((4, 6), torch.float16), "b": TensorSpec((3,), torch.float16)},
        {"w": WEIGHT, "b": TensorSpec((3,), torch.bfloat16)},
        {"b": TensorSpec((3,), torch.float16), "w": WEIGHT},
        {"w": WEIGHT},
    ],
    ids=["name", "shape", "dtype", "order", "missing"],
)
def test_the_model_digest_changes_with_anything_that_ranks_must_share(other: dict[str, TensorSpec]) -> None:
    specs = {"w": WEIGHT, "b": TensorSpec((3,), torch.float16)}
    assert model_digest(specs) == model_digest(dict(specs))
    assert model_digest(specs) != model_digest(other)
