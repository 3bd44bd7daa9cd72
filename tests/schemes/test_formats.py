"""What is packed into a message comes out of it, at the size that was said, and column stripes cover every column."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.bucket import TensorSpec
from gradsync.schemes.formats import (
    ABSENT,
    INT32_ROWS,
    aligned,
    index_dtype,
    read_rows,
    row_counts,
    rows_message_nbytes,
    write_rows,
)
from gradsync.schemes.owners import column_stripes
from gradsync.sparse import SparseRows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@given(
    tables=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7), st.integers(0, 7)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_messages_hold_what_was_written(tables: list[tuple[int, int, int]], dtype: torch.dtype, wide: bool) -> None:
    num_rows = INT32_ROWS + 5 if wide else 50
    written = []
    for rows, dim, start in tables:
        indices = num_rows - 1 - torch.arange(rows)
        written.append((SparseRows(indices, torch.randn(rows, dim).to(dtype), num_rows), (min(start, dim), dim)))
    sizes = [
        rows_message_nbytes(TensorSpec((t.num_rows, t.dim), dtype), t.nnz, stop - start) for t, (start, stop) in written
    ]
    message = torch.empty(int(sum(sizes)), dtype=torch.uint8)
    offset = 0
    for table, columns in written:
        offset = write_rows(message, offset, table, columns)
    assert offset == message.numel()

    offset = 0
    for (table, (start, stop)), size in zip(written, sizes, strict=True):
        spec = TensorSpec((table.num_rows, table.dim), dtype)
        before = offset
        indices, values, offset = read_rows(message, offset, table.nnz, stop - start, spec)
        assert torch.equal(indices.long(), table.indices)
        assert torch.equal(values, table.values[:, start:stop])
        assert offset - before == size


def test_indices_take_four_bytes_as_long_as_they_fit() -> None:
    assert index_dtype(2**31) is torch.int32  # the last row is 2**31 - 1
    assert index_dtype(2**31 + 1) is torch.int64


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 8), (8, 8), (9, 16), (16.0, 16), (10.5, 14.5)])
def test_sections_start_at_multiples_of_eight_and_expected_sizes_at_the_mean(nbytes: float, expected: float) -> None:
    assert aligned(nbytes) == expected


def test_counts_tell_an_absent_table_from_one_without_rows() -> None:
    empty = SparseRows(torch.empty(0, dtype=torch.int64), torch.empty(0, 2), 4)
    absent = SparseRows.absent((4, 2), torch.float32, torch.device("cpu"))
    full = SparseRows(torch.tensor([1, 1, 0]), torch.ones(3, 2), 4)
    assert row_counts((empty, absent, full)).tolist() == [0, ABSENT, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("dim", [0, 1, 2, 7, 8, 64, 100])
def test_stripes_cover_every_column_once_and_differ_by_one_at_most(dim: int, size: int) -> None:
    stripes = column_stripes(dim, size)
    assert [column for start, stop in stripes for column in range(start, stop)] == list(range(dim))
    widths = [stop - start for start, stop in stripes]
    assert len(widths) == size
    assert max(widths) - min(widths) <= 1
