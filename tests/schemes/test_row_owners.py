"""Maps of rows onto owners: bijections with their inverses, whose balance is what Zen's and our own promise."""

from __future__ import annotations

import pytest
import torch

from gradsync.schemes.row_owners import EvenSplit, HashedRows, RotatedStripe, RowOwners
from gradsync.tensors.density import DensityProfile
from gradsync.tensors.sparse import SparseRows

MAPS = [EvenSplit, RotatedStripe, HashedRows]
every_map = pytest.mark.parametrize("kind", MAPS, ids=lambda kind: kind.__name__)


def some_rows(num_rows: int, density: float, dim: int = 3) -> SparseRows:
    generator = torch.Generator().manual_seed(num_rows)
    indices = (torch.rand(num_rows, generator=generator) < density).nonzero().flatten().int()
    return SparseRows(indices, torch.randn(len(indices), dim, generator=generator), num_rows)


@pytest.mark.parametrize("owners", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 1000, 5003])
@every_map
def test_what_is_split_is_joined_again(kind: type[RowOwners], num_rows: int, owners: int) -> None:
    for density in (0.0, 0.1, 1.0):
        rows, of = some_rows(num_rows, density), kind(num_rows, owners)
        parts = of.split(rows)
        assert len(parts) == owners
        for owner, part in enumerate(parts):
            assert (part.indices.diff() > 0).all()
            assert part.nnz == 0 or 0 <= int(part.indices[0]) and int(part.indices[-1]) < of.length
            assert part.num_rows == of.length
            back = of.rows_of(owner, part.indices)
            assert torch.equal(part.values, rows.values[torch.searchsorted(rows.indices.long(), back)])
        whole = of.join(parts)
        assert torch.equal(whole.indices, rows.indices.long())
        assert torch.equal(whole.values, rows.values)
        assert whole.num_rows == num_rows


def imbalance(of: RowOwners, indices: torch.Tensor) -> float:
    """Largest over mean number of rows of an owner (Zen, section 2)."""
    rows = SparseRows(indices.int(), torch.zeros(len(indices), 1), of.num_rows)
    counts = [part.nnz for part in of.split(rows)]
    return max(counts) * of.owners / len(indices)


@pytest.mark.parametrize("owners", [4, 16])
@pytest.mark.parametrize("pattern", ["first rows", "every 16th row", "anywhere"])
def test_balanced_maps_are_balanced_where_an_even_split_is_not(pattern: str, owners: int) -> None:
    num_rows = 1 << 18
    generator = torch.Generator().manual_seed(1)
    indices = {
        "first rows": torch.arange(num_rows // 32),
        "every 16th row": torch.arange(0, num_rows, 16),
        "anywhere": torch.randperm(num_rows, generator=generator)[: num_rows // 20].sort().values,
    }[pattern]
    even, rotated, hashed = (imbalance(kind(num_rows, owners), indices) for kind in MAPS)
    bound = 1 + 5 * (owners / len(indices)) ** 0.5  # of random owners, five standard deviations
    assert rotated < bound
    assert hashed < bound
    assert even == (pytest.approx(owners) if pattern == "first rows" else pytest.approx(1.0, abs=0.1))


def test_the_expected_share_of_an_owner_follows_the_skew_only_where_rows_lie_together() -> None:
    profile = DensityProfile(1000, 100.0, {4: 3.0}, shares=(0.7, 0.1, 0.1, 0.1), union_shares=(0.4, 0.2, 0.2, 0.2))
    assert [round(EvenSplit(1000, 2).share(owner, profile, 1), 6) for owner in range(2)] == [0.8, 0.2]
    assert [round(EvenSplit(1000, 2).share(owner, profile, 4), 6) for owner in range(2)] == [0.6, 0.4]
    assert EvenSplit(1000, 2).share(0, profile, 2) == pytest.approx((0.8 + 0.6) / 2)
    for kind in (RotatedStripe, HashedRows):
        assert [kind(1000, 2).share(owner, profile, 1) for owner in range(2)] == [0.5, 0.5]
