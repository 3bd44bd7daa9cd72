"""Every figure as Zen defines it, computed by hand; estimates from samples within their errors; error messages."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from gradsync.characterization import figures as characterization
from gradsync.characterization.figures import Characterization, characterize
from gradsync.characterization.footprint import Footprint, Sampling, Shape
from gradsync.characterization.statistics import Estimate, Sparsity
from gradsync.comm import run_local
from gradsync.comm.group import Group
from gradsync.tensors.density import profile_rows
from gradsync.tensors.sparse import SparseRows
from tests.world import Ranks


def vector(size: int, indices: Iterable[int]) -> Tensor:
    """Returns a dense gradient, (size,), that is non-zero at `indices` only."""
    dense = torch.zeros(size)
    dense[list(indices)] = 1.0
    return dense


def rows(indices: Tensor, num_rows: int, dim: int = 2) -> SparseRows:
    return SparseRows(indices, torch.ones(len(indices), dim), num_rows)


def elements_of(*ranks: Tensor | SparseRows | None, partitions: int | None = None) -> Sparsity:
    return characterize([{"w": gradient} for gradient in ranks], partitions=partitions).tensors["w"].elements


def values(estimates: dict[int, Estimate]) -> dict[int, float]:
    assert all(estimate.error == 0 for estimate in estimates.values())
    return {key: estimate.value for key, estimate in estimates.items()}


A, B = vector(8, [0, 1, 2]), vector(8, [1, 2, 3, 7])


def test_density_is_the_share_of_elements_that_are_not_zero() -> None:
    density = elements_of(A, B).density
    assert (density.mean, density.least, density.most, density.error) == (3.5 / 8, 3 / 8, 4 / 8, 0)


def test_overlap_is_over_the_smaller_set_for_every_pair() -> None:
    c = vector(8, [6])
    overlap = elements_of(A, B, c).overlap_ratio
    assert overlap is not None
    assert (overlap.least, overlap.most) == (0, 2 / 3)
    assert overlap.mean == pytest.approx(2 / 3 / 3)
    assert sum(elements_of(A, B, c).overlap_histogram) == pytest.approx(1)
    assert elements_of(A, B, c).overlap_histogram[0] == pytest.approx(2 / 3)


def test_densification_is_the_density_of_the_sum_over_that_of_one_rank() -> None:
    figures = elements_of(A, B)
    assert values(figures.union_density) == {1: 3.5 / 8, 2: 5 / 8}
    assert values(figures.densification_ratio) == {1: 1, 2: 5 / 3.5}


def test_sums_over_fewer_ranks_are_means_over_groups_of_neighbours() -> None:
    ranks = [vector(8, s) for s in ([0], [0], [1], [2], [3])]
    assert values(elements_of(*ranks).union_density) == pytest.approx({1: 1 / 8, 2: 1.5 / 8, 4: 3 / 8, 5: 4 / 8})


def test_skewness_is_the_densest_partition_over_the_mean() -> None:
    figures = elements_of(A, B)
    assert values(figures.skewness_ratio) == {
        2: pytest.approx((2 + 1.5) / 2),
        4: pytest.approx((1 / (3 / 8) + 1 / (4 / 8)) / 2),
        8: pytest.approx((8 / 3 + 8 / 4) / 2),
    }
    assert values(figures.union_skewness_ratio) == pytest.approx({2: 1.6, 4: 1.6, 8: 1.6})
    assert figures.union_shares == pytest.approx((0.2, 0.2, 0.2, 0.2, 0, 0, 0, 0.2))


def test_skewness_counts_the_places_of_uneven_partitions() -> None:
    figures = elements_of(vector(5, [3]), partitions=3)  # halves of 3 and 2 places; thirds of 2, 2 and 1
    assert values(figures.skewness_ratio) == {
        2: pytest.approx((1 / 2) / (1 / 5)),
        3: pytest.approx((1 / 2) / (1 / 5)),
        4: pytest.approx(5),
    }


def test_there_are_no_more_partitions_than_places() -> None:
    assert list(elements_of(vector(3, [0]), partitions=7).skewness_ratio) == [2]
    assert list(elements_of(vector(200, [0]), partitions=7).skewness_ratio) == [2, 4, 7, 8, 16, 32, 64, 128]


def test_coarse_partitions_are_sums_of_fine_ones_for_any_size() -> None:
    torch.manual_seed(0)
    for size in (127, 128, 1000, 1001):
        dense = (torch.rand(size) ** 3 < 0.1).float()
        for n, ratio in values(elements_of(dense).skewness_ratio).items():
            part = torch.arange(size) * n // size
            densest = max(float(dense[part == p].mean()) for p in range(n))
            assert ratio == pytest.approx(densest / float(dense.mean())), (size, n)


def test_rows_and_their_filling_are_found_in_dense_and_sparse_gradients() -> None:
    dense = torch.tensor([[0.0, 0], [1, 2], [0, 0], [0, 3]])
    sparse = dense.to_sparse(1)
    for gradient in (dense, sparse, SparseRows.from_torch(sparse)):
        tensor = characterize([{"w": gradient}]).tensors["w"]
        assert tensor.rows is not None
        assert tensor.rows.density.mean == 2 / 4
        assert tensor.elements.density.mean == 3 / 8
        assert tensor.filled_ratio == 3 / 4
        assert tensor.sparse is (gradient is not dense)


def test_repeated_rows_are_summed_before_zeros_are_looked_for() -> None:
    cancelled = SparseRows(torch.tensor([2, 0, 2]), torch.tensor([[1.0, 1], [1, 0], [-1, 1]]), 4)
    tensor = characterize([{"w": cancelled}]).tensors["w"]
    assert tensor.rows is not None
    assert (tensor.rows.density.mean, tensor.elements.density.mean) == (2 / 4, 2 / 8)


def test_nan_is_not_zero_and_minus_zero_is() -> None:
    odd = torch.tensor([math.nan, -0.0, math.inf, 0.0, 1e-45])
    assert elements_of(odd).density.mean == 3 / 5
    table = SparseRows(torch.tensor([1]), torch.tensor([[math.nan, -0.0]]), 2)
    assert elements_of(table).density.mean == 1 / 4


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (5,), (5, 3), ()])
def test_what_is_empty_or_zero_has_no_ratios(shape: tuple[int, ...]) -> None:
    figures = elements_of(torch.zeros(shape), torch.zeros(shape))
    assert figures.density.mean == 0 and figures.overlap_ratio is None
    assert figures.densification_ratio == {} and figures.skewness_ratio == {} and figures.shares == ()


def test_a_rank_that_touches_nothing_counts_for_densities_and_not_for_overlaps() -> None:
    figures = elements_of(A, B, None)
    assert figures.density.least == 0 and figures.density.mean == 7 / 24
    assert figures.overlap_ratio is not None and figures.overlap_ratio.mean == pytest.approx(2 / 3)
    assert figures.skewness_ratio[2].value == pytest.approx(1.75)


def test_together_lays_sparse_tensors_end_to_end() -> None:
    def table(*indices: int) -> SparseRows:
        return rows(torch.tensor(indices), 8, dim=1)

    ranks = [
        {"a": table(0, 1), "full": torch.ones(4), "b": table(0)},
        {"a": table(0), "full": torch.ones(4), "b": None},
    ]
    found = characterize(ranks)
    assert found.together is not None and found.together.size == 16
    assert found.together.density.mean == 2 / 16
    assert found.together.union_density[2].value == 3 / 16
    assert found.tensors["a"].elements.skewness_ratio[2].value == 2
    assert found.together.skewness_ratio[2].value == pytest.approx((4 / 3 + 2) / 2)


def test_figures_are_means_over_steps() -> None:
    found = characterize([[{"w": A}, {"w": B}], [{"w": A}, {"w": A}]])
    figures = found.tensors["w"].elements
    assert found.steps == 2 and found.ranks == 2
    assert figures.density.mean == pytest.approx((3.5 + 3) / 16)
    assert figures.densification_ratio[2].value == pytest.approx((5 / 3.5 + 1) / 2)
    assert figures.overlap_ratio is not None and figures.overlap_ratio.mean == pytest.approx((2 / 3 + 1) / 2)


def test_the_profile_is_that_of_exact_row_counts() -> None:
    lists = [torch.tensor([0, 3]), torch.tensor([3, 5, 6])]
    found = characterize([{"w": rows(indices, 10)} for indices in lists])
    profile, expected = found.profile("w"), profile_rows(lists, 10)
    assert (profile.num_rows, profile.rows, profile.most_rows) == (10, 2.5, 3)
    assert profile.densification == pytest.approx(expected.densification)
    with pytest.raises(ValueError, match="no tensor 'v'.*'w'"):
        found.profile("v")


def test_the_profile_knows_where_rows_lie() -> None:
    lists = [torch.tensor([0, 1, 2, 9]), torch.tensor([0, 1, 3, 15])]
    profile = characterize([{"w": rows(indices, 16)} for indices in lists]).profile("w")
    for start, stop in ((0, 4), (4, 8), (8, 16)):
        assert profile.share(start, stop, 1) == pytest.approx(profile_rows(lists, 16).share(start, stop, 1))
        assert profile.share(start, stop, 2) == pytest.approx(profile_rows(lists, 16).share(start, stop, 2))
    assert profile.share(0, 4, 1) == 0.75


def test_the_profile_of_scattered_elements_is_by_element() -> None:
    scattered = torch.eye(4)
    assert characterize([{"w": scattered}]).profile("w").num_rows == 16


def test_tables_with_the_same_rows_have_the_same_pattern() -> None:
    a, b = rows(torch.tensor([1, 2]), 9, dim=4), rows(torch.tensor([2, 1]), 9, dim=1)
    tensors = characterize([{"a": a, "b": b, "c": rows(torch.tensor([1, 3]), 9)}]).tensors
    assert tensors["a"].pattern == tensors["b"].pattern != tensors["c"].pattern


def test_json_gives_the_same_back() -> None:
    found = characterize([{"w": A, "t": rows(torch.tensor([1]), 70_000)}, {"w": B, "t": None}], sample=1024)
    assert Characterization.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="version 1, got version 2"):
        Characterization.from_json(found.to_json().replace('"version": 1', '"version": 2'))


# Samples.

NUM_ROWS = 40_000


def zipf_ranks(seed: int, ranks: int = 6) -> list[dict[str, SparseRows]]:
    """Returns a table's gradient for each rank; touched rows are skewed and overlap, one element in three is zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1.0, NUM_ROWS + 1)
    found = []
    for _ in range(ranks):
        indices = torch.multinomial(weights, 6000, replacement=True, generator=generator)
        mask = (torch.rand(6000, 4, generator=generator) > 1 / 3).float()
        found.append({"w": SparseRows(indices, mask, NUM_ROWS), "b": SparseRows(indices, mask[:, :1], NUM_ROWS)})
    return found


def deviations(sampled: Sparsity, exact: Sparsity) -> dict[str, float]:
    """Returns how far each estimate is from the exact figure, in its own standard errors."""
    pairs = {
        f"{name} {key}": (estimate, getattr(exact, name)[key].value)
        for name in ("union_density", "densification_ratio", "skewness_ratio", "union_skewness_ratio")
        for key, estimate in getattr(sampled, name).items()
        if estimate.error
    }
    found = {name: (estimate.value - true) / estimate.error for name, (estimate, true) in pairs.items()}
    assert sampled.overlap_ratio is not None and exact.overlap_ratio is not None
    found["overlap"] = (sampled.overlap_ratio.mean - exact.overlap_ratio.mean) / sampled.overlap_ratio.error
    return found


def test_samples_are_within_four_errors_and_errors_are_not_too_wide() -> None:
    squares = []
    for seed in range(4):
        exact, sampled = (characterize(zipf_ranks(seed), sample=sample) for sample in (None, NUM_ROWS // 8))
        views = [(sampled.together, exact.together)]
        for name in ("w", "b"):
            views += [(getattr(f.tensors[name], kind), getattr(e.tensors[name], kind))
                      for kind in ("rows", "elements") for f, e in [(sampled, exact)]]  # fmt: skip
        for view, truth in views:
            assert view is not None and truth is not None and view.looked_at < view.size
            off = deviations(view, truth)
            assert all(abs(z) < 4 for z in off.values()), (seed, off)
            squares += [z * z for name, z in off.items() if not name.startswith(("skew", "union_skew"))]
    assert 0.2 < math.sqrt(sum(squares) / len(squares)) < 1.5


def test_a_sample_has_one_row_of_every_run_at_changing_places() -> None:
    sampling = Sampling.at_most(1000, 7_777)
    places = sampling.places(7_777)
    assert sampling.step == 8
    assert (places[:-1] // 8).equal(torch.arange(len(places) - 1)) and len(places) in (972, 973)
    assert len((places % 8).unique()) == 8
    assert sampling.chosen(torch.arange(7_777), 7_777).equal(places)


def test_sampled_rows_of_dense_and_sparse_gradients_are_the_same() -> None:
    dense = torch.zeros(100_000, 3)
    dense[torch.randperm(100_000, generator=torch.Generator().manual_seed(0))[:2_000]] = 1.0
    dense[::7, 1] = 0
    shape = Shape.of(dense)
    a, b = (Footprint.of(gradient, shape, 10_000) for gradient in (dense, dense.to_sparse(1)))
    assert a.elements is not None and b.elements is not None and len(a.units) > 100
    assert a.units.equal(b.units) and a.elements.equal(b.elements)
    assert a.elements.equal(dense.flatten().nonzero().flatten()[dense_sampled(dense, a.sampling)])


def dense_sampled(dense: Tensor, sampling: Sampling) -> Tensor:
    """Returns the mask of the elements that lie in sampled rows."""
    return torch.isin(dense.flatten().nonzero().flatten() // 3, sampling.places(len(dense)))


def test_with_a_sample_what_is_mostly_not_zero_is_taken_as_full() -> None:
    torch.manual_seed(0)
    wide = torch.rand(300, 300) * (torch.rand(300, 300) > 0.2)
    found = characterize([{"wide": wide, "small": torch.zeros(5)}, {"wide": wide, "small": None}], sample=1000)
    assert found.sampled and found.tensors["wide"].full and found.tensors["small"].full
    assert found.tensors["wide"].elements.density.mean == 1
    assert found.tensors["wide"].elements.skewness_ratio[128].value == 1
    assert found.together is None
    assert not characterize([{"wide": wide}]).tensors["wide"].full


# Groups.


def test_ranks_of_a_group_get_the_figures_of_all() -> None:
    ranks = [{**part, "unused": None, "mine": A if r == 1 else None} for r, part in enumerate(zipf_ranks(0, ranks=3))]
    expected = characterize(ranks, sample=4096)

    def part(group: Group) -> Characterization:
        return characterize(ranks[group.rank], group=group, sample=4096)

    assert expected.tensors.keys() == {"w", "b", "mine"}
    for found in on_ranks(3, part):
        assert found.tensors == expected.tensors


def on_ranks(size: int, function: Callable[[Group], Characterization]) -> list[Characterization]:
    return run_local(size, function)


def test_what_is_wrong_on_one_rank_raises_on_all() -> None:
    errors = []

    def part(group: Group) -> None:
        indices = torch.tensor([9 if group.rank == 1 else 3])
        try:
            characterize({"w": rows(indices, 8)}, group=group)
        except ValueError as error:
            errors.append(str(error))

    run_local(2, part)
    assert len(errors) == 2
    assert all("the gradient of 'w': row indices must be in [0, 8), got 9 to 9" in text for text in errors)
    assert sum(text.startswith("rank 1 could not look") for text in errors) == 1


def over_process_group() -> str:
    indices = torch.tensor([dist.get_rank(), 7])
    return gradsync.characterize({"w": rows(indices, 8)}, group=dist.group.WORLD).to_json()


def test_process_groups_will_do(world: Callable[[int], Ranks]) -> None:
    texts = world(2).run(over_process_group)
    assert texts[0] == texts[1]
    found = Characterization.from_json(texts[0]).tensors["w"].rows
    assert found is not None and found.union_density[2].value == 3 / 8


# Bad input.


def test_missing_ranks_names_and_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        characterize([])
    with pytest.raises(ValueError, match="at least one rank"):
        characterize([[]])
    with pytest.raises(ValueError, match="several ranks in a list"):
        characterize({"w": A})
    with pytest.raises(ValueError, match="rank 1 does not have 'v'"):
        characterize([{"w": A, "v": A}, {"w": A}])
    with pytest.raises(ValueError, match="rank 1 does, rank 0 does not have 'v'"):
        characterize([{"w": A}, {"w": A, "v": A}])
    with pytest.raises(ValueError, match=r"'w' differ in shape: \(8,\), on rank 1 \(9,\)"):
        characterize([{"w": A}, {"w": torch.zeros(9)}])
    with pytest.raises(ValueError, match=r"'w' differ in shape"):
        characterize([[{"w": A}], [{"w": torch.zeros(9)}]])
    with pytest.raises(ValueError, match=r"same number of ranks, got \[1, 2\]"):
        characterize([[{"w": A}], [{"w": A}, {"w": A}]])
    with pytest.raises(ValueError, match="partitions must be at least 1, got 0"):
        characterize([{"w": A}], partitions=0)


@pytest.mark.parametrize("index", [-1, 8])
@pytest.mark.parametrize("sample", [None, 2])
def test_indices_out_of_range_are_named(index: int, sample: int | None) -> None:
    with pytest.raises(
        ValueError, match=rf"'w': row indices must be in \[0, 8\), got {min(index, 1)} to {max(index, 1)}"
    ):
        characterize([{"w": rows(torch.tensor([1, index]), 8)}], sample=sample)


def test_tensors_with_several_sparse_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="'w': expected a sparse COO gradient with one sparse dimension"):
        characterize([{"w": torch.eye(3).to_sparse()}])


def test_the_example_holds() -> None:
    assert doctest.testmod(characterization).failed == 0
