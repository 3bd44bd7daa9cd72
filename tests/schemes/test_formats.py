"""Messages unpack to what was packed, at the predicted size, and column stripes cover every column."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.schemes.capacity import RowCapacity
from gradsync.schemes.formats import PartFormat, RowFormat
from gradsync.schemes.owners import MOST_SHARED, column_owners, striped
from gradsync.schemes.tables import ABSENT, SAME_AS, AgreedRows, OwnRows, RowGroup, common_groups
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.index_formats import SPARSE_FORMATS, IndexFormat, aligned, smallest
from gradsync.tensors.sparse import INT32_ROWS, SparseRows, index_dtype

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@given(
    groups=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 9)),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_messages_hold_what_was_written(
    groups: list[tuple[int, list[int], int]], dtype: torch.dtype, wide: bool
) -> None:
    num_rows = INT32_ROWS + 5 if wide else 50
    row_groups, position = [], 0
    for _, dims, _ in groups:
        specs = tuple(TensorSpec((num_rows, dim), dtype) for dim in dims)
        row_groups.append(RowGroup(tuple(range(position, position + len(dims))), specs))
        position += len(dims)
    rows = [count for count, _, _ in groups]
    columns = [((min(start, g.dim), g.dim), (0, 1)) for (_, _, start), g in zip(groups, row_groups, strict=True)]
    format = RowFormat(tuple(row_groups), tuple(columns))
    message = torch.full((int(format.nbytes(rows)),), 255, dtype=torch.uint8)
    written = []
    for count, section in zip(rows, format.sections(message, rows), strict=True):
        section.positions.encode(num_rows - count + torch.arange(count))
        for values in section.values:
            values.copy_(torch.randn(values.shape))
        written.append([values.clone() for values in section.values])
    again = format.sections(message.clone(), rows)
    for count, values, section, spans in zip(rows, written, again, columns, strict=True):
        assert section.positions.decode().tolist() == [num_rows - count + i for i in range(count)]
        assert all(torch.equal(got, v) for got, v in zip(section.values, values, strict=True))
        assert sum(got.shape[1] for got in section.values) == sum(stop - start for start, stop in spans)


def test_indices_take_four_bytes_as_long_as_they_fit() -> None:
    assert index_dtype(2**31) is torch.int32  # the last row is 2**31 - 1
    assert index_dtype(2**31 + 1) is torch.int64


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 8), (8, 8), (9, 16), (16.0, 16), (10.5, 14.5)])
def test_sections_start_at_multiples_of_eight_and_expected_sizes_at_the_mean(nbytes: float, expected: float) -> None:
    assert aligned(nbytes) == expected


FORMATS = [(each,) for each in IndexFormat] + [SPARSE_FORMATS, tuple(IndexFormat)]


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "dim"), [(1, 1), (63, 1), (64, 2), (65, 3), (6400, 1), (0, 1)])
def test_rows_of_a_part_come_back_in_every_format(
    length: int, dim: int, dtype: torch.dtype, formats: tuple[IndexFormat, ...]
) -> None:
    form = PartFormat(length, dim, dtype, formats)
    for count in {0, 1, length // 32 - 1, length // 32, length // 32 + 1, length - 1, length} & set(range(length + 1)):
        chosen = torch.randperm(length, generator=torch.Generator().manual_seed(count))[:count].sort().values.int()
        values = torch.arange(1, count * dim + 1).view(count, dim).to(dtype)
        message = torch.full((int(form.nbytes(count)),), 255, dtype=torch.uint8)
        form.part(message, count).put(chosen, values)
        positions, found = form.part(message.clone(), count).get()
        dense, expected = torch.zeros(length, dim, dtype=dtype), torch.zeros(length, dim, dtype=dtype)
        dense[positions.long()], expected[chosen.long()] = found, values
        assert torch.equal(dense, expected)
        assert len(positions) == len(found) == count, "a sum of such parts has no rows that are zero on all ranks"
        assert form.choice(count) is IndexFormat.DENSE or torch.equal(positions, chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "dim"), [(64, 1), (6401, 1), (1000, 3)])
def test_the_smallest_message_is_chosen_and_its_size_is_the_formula(length: int, dim: int, dtype: torch.dtype) -> None:
    blocks = -(-length // 256)
    for count in (0, 1, length // 50, length // 31, length // 2, length):
        values = aligned(count * dim * dtype.itemsize)
        nbytes = {
            IndexFormat.LIST: aligned(4 * count) + values,
            IndexFormat.OFFSETS_16: aligned(4 * -(-length // 65536) + 2 * count) + values,
            IndexFormat.OFFSETS_8: aligned(min(blocks, -(-(count + blocks) // 8)) + count) + values,
            IndexFormat.BITMAP: -(-length // 64) * 8 + values,
            IndexFormat.DENSE: aligned(length * dim * dtype.itemsize),
        }
        for choice, expected in nbytes.items():
            assert PartFormat(length, dim, dtype, (choice,)).nbytes(count) == expected
        form = PartFormat(length, dim, dtype, tuple(IndexFormat))
        assert form.nbytes(count) == min(nbytes.values()) == nbytes[form.choice(count)]
        assert form.most_nbytes >= form.nbytes(count)


def test_formats_take_over_at_the_densities_of_their_sizes() -> None:
    """16 bits below 0.049 %, 8 bits up to 12.5 %, then a bit for each element."""
    length = 1 << 24
    chosen = {density: smallest(density * length, length) for density in (5e-6, 1e-4, 4.8e-4, 5e-4, 0.05, 0.12, 0.13)}
    assert list(chosen.values()) == [
        IndexFormat.LIST,
        *[IndexFormat.OFFSETS_16] * 2,
        *[IndexFormat.OFFSETS_8] * 3,
        IndexFormat.BITMAP,
    ]
    only_two = PartFormat(6400, 1, torch.float32, (IndexFormat.LIST, IndexFormat.BITMAP))
    assert [only_two.choice(count) for count in (200, 201)] == [IndexFormat.LIST, IndexFormat.BITMAP]
    assert only_two.nbytes(100.25 + 1 / 8) == 2 * (401.5 + 4), "expected sizes include half of the alignment"


def table(indices: list[int], dim: int = 2, num_rows: int = 4) -> SparseRows:
    return SparseRows(torch.tensor(indices, dtype=torch.int64), torch.ones(len(indices), dim), num_rows)


def test_a_header_tells_distinct_rows_absent_tables_and_rows_seen_before() -> None:
    absent = SparseRows.absent((4, 2), torch.float32, torch.device("cpu"))
    survey = OwnRows.of((table([]), absent, table([1, 1, 0]), table([1, 1, 0], dim=5), table([1, 1, 0], num_rows=9)))
    assert survey.header.tolist() == [0, ABSENT, 2, SAME_AS - 2, 2]
    assert survey.unions[3] is survey.unions[2]


def test_ranks_agree_on_groups_only_where_all_have_the_same_rows() -> None:
    specs = tuple(TensorSpec((4, dim), torch.float32) for dim in (2, 3, 1))
    headers = [[5, SAME_AS, SAME_AS], [6, SAME_AS, 7]]
    agreed = AgreedRows.of(headers, common_groups(headers, specs))
    assert [group.positions for group in agreed.groups] == [(0, 1), (2,)]
    assert agreed.rows == ((5, 5), (6, 7))
    assert agreed.present == (True, True, True)
    headers = [[ABSENT] * 3, [ABSENT, 2, ABSENT]]
    absent = AgreedRows.of(headers, common_groups(headers, specs))
    assert absent.present == (False, True, False)
    assert absent.rows == ((0, 0, 0), (0, 2, 0))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ([5, SAME_AS, 3], True),
        ([5, SAME_AS, SAME_AS], True),  # more in common than planned
        ([0, ABSENT, 0], True),
        ([ABSENT, ABSENT, ABSENT], True),
        ([6, SAME_AS, 3], False),  # one row too many
        ([5, SAME_AS, 6], False),
        ([5, 5, 3], False),  # as many rows, but others
        ([5, ABSENT, 3], False),
        ([ABSENT, 5, 3], False),
    ],
)
def test_rows_fit_a_plan_that_has_room_for_them_and_tells_which_are_the_same(header: list[int], expected: bool) -> None:
    assert RowCapacity(capacity=(5, 5, 5), same_rows=(0, 0, 2)).fits(header) is expected


def test_tables_are_the_same_through_an_earlier_one_that_the_plan_does_not_name() -> None:
    assert RowCapacity(capacity=(4, 4, 4), same_rows=(0, 1, 1)).fits([4, SAME_AS, SAME_AS])


def test_a_plan_for_other_tables_is_refused() -> None:
    specs = (TensorSpec((4, 2), torch.float32), TensorSpec((5, 2), torch.float32))
    with pytest.raises(ValueError, match="planned for 3 tables, the bucket has 2"):
        RowCapacity(capacity=(5,) * 3, same_rows=(0, 1, 2)).planned_groups(specs)
    with pytest.raises(ValueError, match="tables 0 and 1 of the bucket cannot have the same rows: they have 4 and 5"):
        RowCapacity(capacity=(5,) * 2, same_rows=(0, 0)).planned_groups(specs)
    groups = RowCapacity(capacity=(4,) * 3, same_rows=(0, 1, 0)).planned_groups((specs[0],) * 3)
    assert [group.positions for group in groups] == [(0, 2), (1,)]


def test_a_groups_columns_lie_side_by_side() -> None:
    group = RowGroup((0, 3), (TensorSpec((4, 5), torch.float32), TensorSpec((4, 2), torch.float32)))
    found = [[(piece.position, piece.columns) for piece in group.pieces([span])] for span in [(0, 2), (4, 6), (5, 5)]]
    assert found == [[(0, (0, 2))], [(0, (4, 5)), (3, (0, 1))], []]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("dim", [0, 1, 2, 7, 8, 17, 64, 100])
def test_every_column_has_one_owner_or_is_shared(dim: int, size: int) -> None:
    owners = column_owners(dim, size)
    spans = [*owners.stripes, owners.shared]
    assert [column for start, stop in spans for column in range(start, stop)] == list(range(dim))
    widths = [stop - start for start, stop in owners.stripes]
    assert len(widths) == size
    shared = owners.shared[1] - owners.shared[0]
    assert max(widths) - min(widths) == (0 if dim % size <= MOST_SHARED else 1)
    assert shared == (dim % size if dim % size <= MOST_SHARED else 0)
    assert widths[-1] == max(widths)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_striped_groups_give_each_column_of_each_table_to_one_owner_or_to_all(size: int) -> None:
    groups = (
        RowGroup((0, 2), (TensorSpec((4, 16), torch.float32), TensorSpec((4, 1), torch.float32))),
        RowGroup((1,), (TensorSpec((9, 5), torch.float32),)),
    )
    stripes = striped(groups, size)
    for number, group in enumerate(groups):
        shared = list(stripes.shared[number])
        owned = [piece for owner in stripes.owned for piece in owner[number]]
        columns = [(p.position, c) for p in [*owned, *shared] for c in range(*p.columns)]
        assert sorted(columns) == [
            (position, c) for position, s in zip(group.positions, group.specs, strict=True) for c in range(s.dim)
        ]
        for owner, format in enumerate(stripes.formats):
            assert list(format.pieces[number]) == [*shared, *stripes.owned[owner][number]]
            assert stripes.widths[owner][number] == sum(p.width for p in stripes.owned[owner][number])
    assert striped(groups, size) is stripes  # a step finds it ready


def entropy_nbytes(count: int, length: int) -> float:
    """Returns the entropy of choosing `count` of `length` places at random, in bytes."""
    return (math.lgamma(length + 1) - math.lgamma(count + 1) - math.lgamma(length - count + 1)) / math.log(2) / 8


DENSITIES = (0.001, 0.002, 0.004, 0.01, 0.02, 0.05, 0.1)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("width", "bound"), [(16, 1.01), (4, 1.03), (2, 1.06)])
def test_messages_of_rows_are_hardly_larger_than_their_information(width: int, bound: float, density: float) -> None:
    """Whole rows of 16 columns, and column stripes of 4 and of 2, of float32."""
    num_rows = 200_000
    count = int(density * num_rows)
    format = RowFormat.whole((RowGroup((0,), (TensorSpec((num_rows, width), torch.float32),)),))
    information = entropy_nbytes(count, num_rows) + 4 * width * count
    assert information < format.nbytes([count]) <= bound * information


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1.10), (torch.bfloat16, 1.18)], ids=str)
def test_messages_of_elements_are_hardly_larger_either(dtype: torch.dtype, bound: float, density: float) -> None:
    """Worst at 10 %, where offsets of 8 bits and a bitmap are about as large."""
    length = 200_000
    count = int(density * length)
    information = entropy_nbytes(count, length) + dtype.itemsize * count
    assert information < PartFormat(length, 1, dtype).nbytes(count) <= bound * information
