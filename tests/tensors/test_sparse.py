"""Rows of a table: to and from torch's tensors without a change of value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradsync.tensors.sparse import SparseRows


def test_rows_of_an_embedding_gradient_share_its_memory_and_stay_uncoalesced() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([7, 2, 7])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    rows = SparseRows.from_torch(gradient)
    assert (rows.indices.tolist(), rows.num_rows, rows.dim, rows.nnz, rows.present) == ([7, 2, 7], 10, 4, 3, True)
    assert rows.values.data_ptr() == gradient._values().data_ptr()
    assert torch.equal(torch.zeros(10, 4).index_add_(0, rows.indices, rows.values), gradient.to_dense())


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3), (0, 3), (5, 0)])
def test_dense_and_sparse_tensors_of_any_shape_return(shape: tuple[int, ...]) -> None:
    dense = torch.arange(float(torch.Size(shape).numel())).reshape(shape)  # row 0 of (5,) is zero
    rows = SparseRows.from_dense(dense)
    assert rows.num_rows == shape[0]
    assert torch.equal(rows.write_to(torch.zeros(shape)), dense)
    sparse = rows.to_torch(shape)
    assert sparse.is_coalesced()
    assert torch.equal(sparse.to_dense(), dense)
    again = SparseRows.from_torch(sparse)
    assert torch.equal(again.indices, rows.indices)
    assert torch.equal(again.values, rows.values)


def test_from_dense_takes_any_memory_format() -> None:
    dense = torch.randn(6, 4, 3, 2)
    for strided in (dense.to(memory_format=torch.channels_last), dense.transpose(0, 1), dense[:, :, :, 0]):
        rows = SparseRows.from_dense(strided)
        assert torch.equal(rows.write_to(torch.zeros(strided.shape)), strided)


def test_from_dense_takes_the_rows_that_are_not_zero_everywhere() -> None:
    dense = torch.zeros(5, 2)
    dense[1, 1], dense[3, 0], dense[4] = 2.0, float("nan"), -0.0
    assert SparseRows.from_dense(dense).indices.tolist() == [1, 3]


def test_write_to_overwrites_the_rows_it_has() -> None:
    dense = torch.ones(3, 2)
    result = SparseRows(torch.tensor([2, 0]), torch.tensor([[5.0, 6.0], [7.0, 8.0]]), 3).write_to(dense)
    assert result is dense
    assert dense.tolist() == [[7, 8], [1, 1], [5, 6]]


def test_an_absent_table_has_the_row_length_but_no_rows() -> None:
    absent = SparseRows.absent((10, 2, 3), torch.float16, torch.device("cpu"))
    assert (absent.nnz, absent.dim, absent.num_rows, absent.present) == (0, 6, 10, False)
    assert (absent.values.dtype, absent.indices.dtype) == (torch.float16, torch.int64)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 3), r"one sparse dimension \(rows\), got layout torch.strided$"),
        (torch.eye(3).to_sparse(), "got layout torch.sparse_coo with 2 sparse dimensions"),
    ],
)
def test_other_layouts_are_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseRows.from_torch(tensor)


@pytest.mark.parametrize(
    ("indices", "values", "got"),
    [
        (torch.zeros(2).long(), torch.zeros(3, 4), r"\(2,\) and \(3, 4\)"),
        (torch.zeros(2).long(), torch.zeros(2), r"\(2,\) and \(2,\)"),
        (torch.zeros(1, 2).long(), torch.zeros(2, 4), r"\(1, 2\) and \(2, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(indices: Tensor, values: Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=r"indices of shape \(nnz,\) and values of shape \(nnz, dim\), got " + got):
        SparseRows(indices, values, 10)


def test_an_absent_table_cannot_bring_rows() -> None:
    with pytest.raises(ValueError, match="present=False has no rows, got 2"):
        SparseRows(torch.tensor([0, 1]), torch.zeros(2, 4), 10, present=False)
