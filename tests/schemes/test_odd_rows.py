"""Unusual rows: zeros of both signs, tables of more than 2^31 elements or rows, and unusual tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsync.comm import GroupError, LocalGroup, drive, run_local
from gradsync.tensors.bucket import Layout
from gradsync.tensors.sparse import SparseRows, index_dtype
from tests.schemes.family import ROUNDED_MEMBERS, ROW_MEMBERS, Member, bits, run

every_row_member = pytest.mark.parametrize("member", ROW_MEMBERS, ids=lambda member: member.name)

BIG = {  # rows, elements of a row: nothing of such a table is stored but the rows touched
    "2^31 elements": (2**26, 32),
    "3 * 2^31 elements and a few": (2**27 + 3, 48),
    "2^31 rows": (2**31, 2),
    "more rows than int32 indices reach": (2**31 + 65, 1),
}


@pytest.mark.parametrize(
    "member",
    [*ROW_MEMBERS, *(m for m in ROUNDED_MEMBERS if m.scheme.traits.layout is Layout.ROWS)],
    ids=lambda member: member.name,
)
@pytest.mark.parametrize("shape", BIG)
def test_tables_of_2_31_elements_and_more_are_summed(member: Member, shape: str) -> None:
    num_rows, dim = BIG[shape]
    assert num_rows * dim >= 2**31
    assert (index_dtype(num_rows) is torch.int64) == (num_rows > 2**31)

    def rows_of(rank: int) -> tuple[SparseRows, ...]:
        indices = torch.tensor([num_rows - 1, 5 + rank, num_rows - 2 - rank, 0, num_rows // 2, num_rows - 1])
        values = torch.arange(6.0 * dim).view(6, dim) + rank
        return (SparseRows(indices, values, num_rows),)

    inputs = [rows_of(rank) for rank in range(2)]
    expected: dict[int, Tensor] = {}
    for (table,) in inputs:
        for row, value in zip(table.indices.tolist(), table.values, strict=True):
            expected[row] = expected.get(row, torch.zeros(dim)) + value
    for (result,) in run(member, inputs, 0.5).results:
        assert result.indices.tolist() == sorted(expected)
        assert torch.equal(result.values, torch.stack([expected[row] for row in sorted(expected)]) / 2)
        assert result.num_rows == num_rows


@every_row_member
@pytest.mark.parametrize("size", [1, 2, 4])
def test_zeros_of_both_signs_are_rows_and_sum_to_zero_with_one_sign_on_all_ranks(member: Member, size: int) -> None:
    def brought(rank: int) -> tuple[SparseRows, ...]:
        values = torch.full((3, 4), -0.0)
        values[1] = 0.0 if rank % 2 else -0.0
        return (SparseRows(torch.tensor([6, 2, 4]), values, 8),)

    results = run(member, [brought(rank) for rank in range(size)], 1 / size).results
    assert all(bits(result) == bits(results[0]) for result in results)
    assert results[0][0].indices.tolist() == [2, 4, 6], "a row of zeros was brought: it is not absent"
    assert (results[0][0].values == 0).all()


@every_row_member
@pytest.mark.parametrize(
    ("values", "error"),
    [
        (torch.ones(4, 2).T, "TypeError: values must be rows of adjacent elements"),
        (torch.ones(2, 8)[:, ::2], "TypeError: values must be rows of adjacent elements"),
        (torch.ones(2, 4).long(), "TypeError: values must be"),
    ],
    ids=["transposed", "every other column", "integers"],
)
def test_values_of_another_kind_are_a_type_error_on_every_rank(member: Member, values: Tensor, error: str) -> None:
    said: dict[int, str] = {}
    indices = torch.tensor([1, 2])
    scheme = member.planned([(SparseRows(indices, torch.ones(2, 4), 8),)] * 3)

    def rank_main(group: LocalGroup) -> None:
        rows = (SparseRows(indices, values if group.rank == 1 else torch.ones(2, 4), 8),)
        try:
            drive(scheme.synchronize(rows, {}, group, 1.0), timeout_s=20)
        except Exception as caught:
            said[group.rank] = f"{type(caught).__name__}: {caught}"
            raise

    with pytest.raises((TypeError, GroupError), match=error.removeprefix("TypeError: ")):
        run_local(3, rank_main)
    assert sorted(said) == [0, 1, 2]
    assert said[1].startswith(error)
