"""The memory of a bucket: gradients go in and come out, lie where they should, and flags say which ranks used them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsync.tensors.bucket import NUM_MARKS, Bucket, Layout, Segment, TensorSpec
from gradsync.tensors.gradients import FlatGradients, RowGradients, gradients_of
from gradsync.tensors.sparse import SparseRows


def flat_gradients(
    parameters: dict[str, Tensor], segments: list[tuple[str, int, int]] | None = None, *, flags_ride: bool = True
) -> FlatGradients:
    parts = [Segment(*s) for s in segments or [(name, 0, p.numel()) for name, p in parameters.items()]]
    specs = tuple(TensorSpec.of(parameters[part.name]) for part in parts)
    gradients = gradients_of(Bucket("0", tuple(parts), specs, Layout.FLAT, flags_ride), parameters, CPU)
    assert isinstance(gradients, FlatGradients)
    return gradients


def row_gradients(parameters: dict[str, Tensor]) -> RowGradients:
    segments = tuple(Segment(name, 0, p.numel()) for name, p in parameters.items())
    specs = tuple(TensorSpec.of(p) for p in parameters.values())
    gradients = gradients_of(Bucket("0", segments, specs, Layout.ROWS), parameters, CPU)
    assert isinstance(gradients, RowGradients)
    return gradients


def rows_of(indices: list[int], value: float, shape: tuple[int, ...]) -> Tensor:
    """Returns a sparse gradient, not coalesced."""
    values = torch.full((len(indices), *shape[1:]), value)
    return torch.sparse_coo_tensor(torch.tensor([indices]), values, shape, check_invariants=True)


CPU = torch.device("cpu")
NO_MARKS = [0.0] * NUM_MARKS
WEIGHT, BIAS = torch.arange(6.0).reshape(2, 3), torch.tensor([7.0, 8.0])


def test_loaded_gradients_lie_one_after_the_other_and_come_out_as_they_went_in() -> None:
    gradients = flat_gradients({"w": WEIGHT, "b": BIAS})
    gradients.begin()
    gradients.load("b", BIAS)
    gradients.load("w", WEIGHT)
    flat = gradients.take(check_finite=False)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 1, 1, 0, *NO_MARKS]
    gradients.accept(flat * 2)  # a result in other memory
    assert torch.equal(gradients.unload("w", None, shape=WEIGHT.shape), 2 * WEIGHT)
    assert torch.equal(gradients.unload("b", None, shape=BIAS.shape), 2 * BIAS)


def test_a_gradient_that_lives_in_its_view_is_not_copied() -> None:
    gradients = flat_gradients({"w": WEIGHT, "b": BIAS})
    view = gradients.view("w")
    assert view is not None
    view.copy_(WEIGHT)
    gradients.load("w", view)
    flat = gradients.take(check_finite=False)
    assert flat.data_ptr() == view.data_ptr()
    gradients.accept(flat.mul_(3))
    assert gradients.unload("w", None, shape=WEIGHT.shape) is view
    assert torch.equal(view, 3 * WEIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_factor_multiplies_gradients_as_they_are_loaded_and_leaves_flags_alone(dtype: torch.dtype) -> None:
    """The same bits as by `mul_` of the whole bucket, wherever a gradient comes from."""
    names = ("copied", "in its view", "together a", "together b", "sparse", "cut", "unused")
    values = {name: torch.randn(4, 6).to(dtype) for name in names}
    values["copied"] = torch.randn(1, 2, 3, 4).to(dtype).contiguous(memory_format=torch.channels_last)
    segments = [(name, 0, 24) for name in names if name != "cut"] + [("cut", 0, 7), ("cut", 7, 24)]
    expected, found = flat_gradients(values, segments), flat_gradients(values, segments)
    for gradients, factor in ((expected, 1.0), (found, 1 / 3)):
        gradients.begin(factor)
        for name in ("in its view", "together a", "together b"):
            view = gradients.view(name)
            assert view is not None
            view.copy_(values[name])
        gradients.load("copied", values["copied"])
        gradients.load("cut", values["cut"])
        gradients.load("sparse", values["sparse"].to_sparse())
        gradients.load("unused", None, used=False)
        gradients.load("in its view", gradients.view("in its view"))
        gradients.load_views(["together a", "together b"])
    assert torch.equal(found.take(check_finite=False)[:168], expected.take(check_finite=False)[:168].mul_(1 / 3))
    assert torch.equal(found.flags, expected.flags)


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_the_values_of_a_gradient_in_a_graph_are_taken_without_the_graph(factor: float) -> None:
    gradients = flat_gradients({"w": WEIGHT})
    gradients.begin(factor)
    gradients.load("w", WEIGHT.clone().requires_grad_())
    assert torch.equal(gradients.values, WEIGHT.flatten() * factor)
    assert not gradients.flat.requires_grad


@pytest.mark.parametrize("names", ["abcd", "dcba", "bc", "ad", "acd", "b", ""])
def test_gradients_that_live_in_the_bucket_are_multiplied_in_any_order_and_no_others(names: str) -> None:
    lengths = {"a": 3, "b": 1, "c": 0, "d": 4}
    gradients = flat_gradients({name: torch.zeros(length) for name, length in lengths.items()})
    gradients.begin(1 / 3)
    gradients.values.fill_(1.0)
    gradients.load_views(list(names))
    expected = [1 / 3 if name in names else 1.0 for name, length in lengths.items() for _ in range(length)]
    assert torch.equal(gradients.take(check_finite=False)[:8], torch.tensor(expected))
    assert gradients.flags[:4].tolist() == [float(name in names) for name in lengths]


@pytest.mark.parametrize(
    "parameter",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 3).t(),
        torch.randn(3, 4),
        torch.tensor(1.5),
        torch.empty(0, 3),
    ],
    ids=["channels last", "channels last 3d", "transposed", "plain", "scalar", "empty"],
)
def test_views_have_the_parameters_strides_as_autograd_gives_them(parameter: Tensor) -> None:
    gradients = flat_gradients({"before": BIAS, "p": parameter})
    view = gradients.view("p")
    assert view is not None
    assert (view.shape, view.stride(), view.dtype) == (parameter.shape, parameter.stride(), parameter.dtype)
    gradients.load("before", BIAS)
    gradients.load("p", parameter.clone(memory_format=torch.contiguous_format))
    assert torch.equal(view, parameter)
    flat = gradients.take(check_finite=False)
    assert flat[: BIAS.numel()].tolist() == BIAS.tolist(), "a view stays inside its own part"
    assert torch.equal(flat[BIAS.numel() : -3 - NUM_MARKS].sort().values, parameter.flatten().sort().values)


@pytest.mark.parametrize("cut", [[("p", 0, 24)], [("p", 0, 7), ("p", 7, 24)]], ids=["whole", "cut"])
def test_in_order_elements_lie_by_their_index_and_gradients_come_back_in_the_parameters_strides(cut: list) -> None:
    parameter = torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last)
    segments = tuple(Segment(*each) for each in cut)
    bucket = Bucket("0", segments, (TensorSpec.of(parameter),) * len(segments), Layout.FLAT)
    gradients = gradients_of(bucket, {"p": parameter}, CPU, in_order=True)
    assert gradients.view("p") is None
    gradients.begin()
    gradients.load("p", parameter)
    flat = gradients.take(check_finite=False)
    assert torch.equal(flat[:24], parameter.flatten())
    gradients.accept(flat * 2)
    for out in (None, torch.zeros_like(parameter), torch.zeros(1, 2, 3, 4)):
        back = gradients.unload("p", out, shape=parameter.shape)
        assert torch.equal(back, 2 * parameter)
        assert back.stride() == (parameter if out is None else out).stride()
        assert out is None or back is out


def test_in_order_contiguous_gradients_live_in_the_bucket_nevertheless() -> None:
    bucket = Bucket("0", (Segment("w", 0, 6),), (TensorSpec.of(WEIGHT),), Layout.FLAT)
    assert gradients_of(bucket, {"w": WEIGHT}, CPU, in_order=True).view("w") is not None


def test_an_expanded_parameter_has_a_view_without_shared_elements() -> None:
    parameter = torch.randn(3, 1).expand(3, 4)
    view = flat_gradients({"p": parameter}).view("p")
    assert view is not None
    assert view.is_contiguous()


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous out", "channels last out"])
@pytest.mark.parametrize("reuse", [False, True], ids=["new", "reused"])
def test_a_parameter_cut_across_buckets_is_put_together_again(reuse: bool, channels_last: bool) -> None:
    parameter = torch.arange(24.0).reshape(1, 2, 3, 4)
    whole = {"p": parameter, "b": BIAS}
    first = flat_gradients(whole, [("p", 0, 5), ("p", 20, 24)])
    second = flat_gradients(whole, [("b", 0, 2), ("p", 5, 20)])
    assert first.view("p") is None
    assert second.view("p") is None
    assert second.view("b") is not None
    for gradients in (first, second):
        gradients.begin()
        gradients.load("p", parameter)
        flat = gradients.take(check_finite=False)
        gradients.accept(flat * 10)
    assert first.flat[:9].tolist() == [10.0 * x for x in (0, 1, 2, 3, 4, 20, 21, 22, 23)]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.full((1, 2, 3, 4), -1.0).contiguous(memory_format=layout) if reuse else None
    for gradients in (first, second):
        out = gradients.unload("p", out, shape=parameter.shape)
    assert out is not None
    assert torch.equal(out, 10 * parameter)


def test_flags_tell_who_used_what() -> None:
    gradients = flat_gradients({"w": WEIGHT, "b": BIAS, "c": BIAS})
    gradients.begin()
    gradients.load("w", WEIGHT)
    gradients.load("b", BIAS, used=False)  # kept from an earlier backward: travels, but was not used
    gradients.load("c", None, used=False)
    flat = gradients.take(check_finite=False)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 0, 0, 1, 0, 0, 0, *NO_MARKS]
    gradients.accept(flat)
    assert [gradients.used(name) for name in "wbc"] == [True, False, False]
    flat[-2 - NUM_MARKS] = 0.25  # another rank used c; flags were scaled with the rest
    assert [gradients.used(name) for name in "wbc"] == [True, False, True]
    gradients.begin()
    gradients.load("w", None, used=False)
    assert gradients.take(check_finite=False)[-4 - NUM_MARKS :].tolist() == [0, 0, 0, 0, *NO_MARKS]


def test_loading_nothing_clears_what_the_last_step_left() -> None:
    gradients = flat_gradients({"w": WEIGHT, "b": BIAS})
    gradients.load("w", WEIGHT)
    gradients.load("w", None)
    assert gradients.take(check_finite=False)[:6].tolist() == [0] * 6
    gradients.flat.fill_(1)
    gradients.clear()
    assert not gradients.flat.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_check_marks_the_step_whose_values_are_not_finite(dtype: torch.dtype, bad: float) -> None:
    gradients = flat_gradients({"w": WEIGHT.to(dtype)})
    spoilt = WEIGHT.to(dtype).clone()
    spoilt[1, 1] = bad
    for gradient, check, troubled in (
        (spoilt, True, True),
        (spoilt, False, False),
        (WEIGHT.to(dtype), True, False),
    ):
        gradients.begin()
        gradients.load("w", gradient)
        gradients.accept(gradients.take(check_finite=check))
        assert gradients.had_non_finite().item() is troubled


def test_flags_that_do_not_ride_stay_out_of_what_the_scheme_gets() -> None:
    gradients = flat_gradients({"w": WEIGHT}, flags_ride=False)
    gradients.begin()
    gradients.load("w", WEIGHT)
    values = gradients.take(check_finite=True)
    assert values.tolist() == WEIGHT.flatten().tolist()
    assert gradients.flags.tolist() == [1, 0, *NO_MARKS]
    gradients.accept(values * 2)
    assert gradients.flat.tolist() == [*(2 * WEIGHT).flatten().tolist(), 1, 0, *NO_MARKS]


def test_a_sparse_gradient_may_travel_in_a_flat_bucket() -> None:
    gradients = flat_gradients({"t": torch.zeros(4, 2)})
    gradients.load("t", rows_of([3, 1, 3], 1.0, (4, 2)))
    gradients.accept(gradients.take(check_finite=False))
    dense = gradients.unload("t", None, shape=torch.Size((4, 2)))
    assert dense.tolist() == [[0, 0], [1, 1], [0, 0], [2, 2]]


TABLES = {"t": torch.zeros(6, 2), "u": torch.zeros(4, 3)}


def test_tables_are_taken_as_they_came_and_delivered_in_the_layout_asked_for() -> None:
    gradients = row_gradients(TABLES)
    gradients.begin()
    brought = rows_of([5, 1, 5], 2.0, (6, 2))
    gradients.load("t", brought)
    first, second = gradients.take(check_finite=True)
    assert first.values.data_ptr() == brought._values().data_ptr()
    assert (first.indices.tolist(), first.present) == ([5, 1, 5], True)
    assert (second.nnz, second.dim, second.num_rows, second.present) == (0, 3, 4, False)
    total = SparseRows(torch.tensor([1, 5]), torch.tensor([[2.0, 2.0], [4.0, 4.0]]), 6)
    gradients.accept((total, second))
    assert (gradients.used("t"), gradients.used("u")) == (True, False) and not gradients.had_non_finite()
    assert (gradients.rows("t"), gradients.union_rows("t")) == (2, 2)
    sparse = gradients.table("t").to_torch((6, 2))
    dense = gradients.unload("t", None, shape=torch.Size((6, 2)))
    assert sparse.is_coalesced()
    assert torch.equal(sparse.to_dense(), dense)
    assert dense.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [0, 0], [4, 4]]


def test_a_dense_gradient_of_a_table_has_the_parameters_strides_on_ranks_that_brought_none() -> None:
    parameter = torch.randn(3, 5).t()
    gradients = row_gradients({"t": parameter})
    gradients.begin()
    gradients.load("t", None, used=False)
    gradients.take(check_finite=False)
    gradients.accept((SparseRows(torch.tensor([1, 4]), torch.arange(6.0).view(2, 3), 5),))
    dense = gradients.unload("t", None, shape=torch.Size((5, 3)))
    assert dense.stride() == parameter.stride()
    assert dense.tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0], [0, 0, 0], [3, 4, 5]]


def test_a_table_used_without_rows_is_present_and_one_not_used_is_absent() -> None:
    gradients = row_gradients(TABLES)
    gradients.begin()
    gradients.load("t", rows_of([], 0.0, (6, 2)))
    gradients.load("u", None, used=False)
    assert [(t.nnz, t.present) for t in gradients.take(check_finite=False)] == [(0, True), (0, False)]
    gradients.begin()
    gradients.load("t", rows_of([], 0.0, (6, 2)), used=False)
    assert [t.present for t in gradients.take(check_finite=False)] == [False, False]


def test_rows_kept_from_an_earlier_backward_travel_with_the_step() -> None:
    gradients = row_gradients(TABLES)
    gradients.begin()
    gradients.load("t", rows_of([2, 3], 1.0, (6, 2)), used=False)
    stale, _ = gradients.take(check_finite=False)
    assert (stale.indices.tolist(), stale.present) == ([2, 3], True)
    gradients.begin()
    assert [t.present for t in gradients.take(check_finite=False)] == [False, False], "a new step forgets them"


@pytest.mark.parametrize("layout", ["strided", "two sparse dimensions"])
def test_other_layouts_of_a_table_s_gradient_become_rows(layout: str) -> None:
    dense = torch.zeros(6, 2)
    dense[4] = 3.0
    gradients = row_gradients(TABLES)
    gradients.begin()
    gradients.load("t", dense if layout == "strided" else dense.to_sparse())
    rows, _ = gradients.take(check_finite=False)
    assert (rows.indices.tolist(), rows.values.tolist()) == ([4], [[3.0, 3.0]])
