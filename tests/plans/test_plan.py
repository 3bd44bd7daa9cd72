"""Plans on disk: reading gives what was written, and errors name the misfit, its place and the expectation."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from gradsync.plans.plan import Plan, What, default_order, describe
from gradsync.schemes import AGSparse, AllReduce, BalancedParallelism, Shuffled
from gradsync.tensors.bucket import Layout, TensorSpec, model_digest

SPECS = {
    "table": TensorSpec((10, 4), torch.float32),
    "w": TensorSpec((6, 2), torch.float32),
    "b": TensorSpec((6,), torch.float32),
    "half": TensorSpec((4,), torch.float16),
    "empty": TensorSpec((0, 3), torch.float32),
}


def make() -> Plan:
    """A plan with a cut parameter, a table, two dtypes and a parameter without elements."""
    return Plan.make(
        SPECS,
        4,
        [
            ([("w", 0, 5), ("b", 0, 6)], AllReduce()),
            (["table"], BalancedParallelism()),
            ([("w", 5, 12), ("empty", 0, 0)], AllReduce()),
            (["half"], AllReduce()),
        ],
    )


def edited(**changes: Any) -> dict[str, Any]:
    """The plan as JSON data without its digest, some fields replaced."""
    data: dict[str, Any] = {**json.loads(make().to_json()), **changes}
    del data["digest"]
    return data


def bucket(number: int, **changes: Any) -> list[dict[str, Any]]:
    """The plan's buckets, with changes to one of them."""
    buckets: list[dict[str, Any]] = edited()["buckets"]
    buckets[number] |= changes
    return buckets


def read(data: dict[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(data))


def test_a_plan_fits_the_model_it_was_made_for() -> None:
    make().check(SPECS, 4)


def test_json_round_trip_keeps_everything(tmp_path: Path) -> None:
    plan = make()
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")).digest == plan.digest


def test_a_capacity_is_part_of_the_plan() -> None:
    specs = {"table": SPECS["table"]}
    plans = [
        Plan.make(specs, 4, [(["table"], BalancedParallelism(capacity=(rows,), same_rows=(0,)))]) for rows in (40, 41)
    ]
    assert len({plan.digest for plan in plans}) == 2
    for plan, rows in zip(plans, (40, 41), strict=True):
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.order == (("0", "push"), ("0", "pull"))
        assert plan.buckets[0].scheme == BalancedParallelism(capacity=(rows,), same_rows=(0,))


def test_json_has_the_documented_form() -> None:
    data = json.loads(make().to_json())
    assert list(data) == ["version", "world", "model", "order", "buckets", "digest"]
    assert (data["version"], data["world"], data["model"]) == (1, 4, model_digest(SPECS))
    assert data["order"] == [
        ["0", "all_reduce"],
        ["1", "sizes"],
        ["2", "all_reduce"],
        ["3", "all_reduce"],
        ["1", "push"],
        ["1", "pull"],
    ]
    assert data["buckets"][0] == {
        "id": "0",
        "segments": [["w", 0, 5], ["b", 0, 6]],
        "what": "gradient",
        "scheme": {"all_reduce": {}},
    }
    settings = {"owners": "column_stripe", "capacity": [], "same_rows": []}
    assert data["buckets"][1]["scheme"] == {"balanced_parallelism": settings}
    assert data["digest"] == make().digest


def test_a_plan_of_the_documented_form_is_read() -> None:
    plan = read({"version": 1, "world": 2, "model": "m", "order": [], "buckets": []})
    assert (plan.world, plan.buckets) == (2, ())


def test_a_plan_made_for_one_kind_of_device_is_refused_on_another() -> None:
    plan = make().model_copy(update={"device": "cuda"})
    assert Plan.from_json(plan.to_json()) == plan and plan.digest != make().digest
    plan.check(SPECS, 4)
    plan.check(SPECS, 4, "cuda")
    make().check(SPECS, 4, "cuda")
    with pytest.raises(ValueError, match="measurements on 'cuda', the parameters are on 'cpu': measure and plan there"):
        plan.check(SPECS, 4, "cpu")


def test_the_digest_is_the_same_in_every_process() -> None:
    plan = Plan(world=2, model="m", order=(("0", "all_reduce"),), buckets=())
    canonical = '{"buckets":[],"model":"m","order":[["0","all_reduce"]],"version":1,"world":2}'
    assert plan.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert make().digest == make().digest


@pytest.mark.parametrize(
    "changes",
    [
        {"world": 5},
        {"model": "another"},
        {"order": edited()["order"][::-1]},
        {"buckets": bucket(0, id="zero")},
        {"buckets": bucket(0, segments=[["w", 0, 4], ["b", 0, 6]])},
        {"buckets": bucket(0, what="parameter")},
        {"buckets": bucket(1, scheme={"agsparse": {}})},
        {"buckets": bucket(1)[::-1]},
    ],
    ids=["world", "model", "order", "id", "segments", "what", "scheme", "bucket order"],
)
def test_the_digest_changes_with_every_field(changes: dict[str, Any]) -> None:
    assert read(edited()).digest == make().digest
    assert read(edited(**changes)).digest != make().digest


def test_a_plan_changed_by_hand_must_drop_its_digest() -> None:
    data = json.loads(make().to_json()) | {"world": 8}
    with pytest.raises(ValueError, match="changed after it was written.*delete the entry 'digest'") as caught:
        read(data)
    assert make().digest[:12] in str(caught.value)
    del data["digest"]
    assert read(data).world == 8
    with pytest.raises(ValueError, match="its digest says 12, its content is"):
        read(data | {"digest": 12})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (edited(version=2), "plan, field version: .* 1 .*got 2"),
        (edited(world="four"), "plan, field world: .*integer.*got four"),
        (edited(worlds=4), "plan, field worlds: Extra inputs are not permitted"),
        ({k: v for k, v in edited().items() if k != "order"}, "plan, field order: Field required"),
        (edited(order=[["0"]]), r"plan, field order\.0\.1: Field required"),
        (edited(buckets=bucket(0, segments=[["w", 0]])), r"plan, field buckets\.0\.segments\.0\.2: Field required"),
        (edited(buckets=bucket(0, size=3)), r"plan, field buckets\.0\.size: Extra inputs are not permitted"),
        (
            edited(buckets=bucket(0, what="weights")),
            r"field buckets\.0\.what: .*'gradient', 'parameter' or 'early_parameter'.*got weights",
        ),
        (edited(buckets=bucket(2, scheme={"rumour": {}})), r"buckets\.2\.scheme: .*unknown scheme 'rumour'; there are"),
        (edited(buckets=bucket(2, scheme={"all_reduce": {"k": 1}})), r"\.scheme: .*'all_reduce' has no setting 'k'"),
        (
            edited(buckets=bucket(2, scheme="all_reduce")),
            r"field buckets\.2\.scheme: .* a scheme \(in JSON .*got all_reduce",
        ),
    ],
)
def test_errors_in_the_file_name_the_field_and_the_reason(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the plan is no JSON: "),
        ("", "the plan is no JSON: "),
        ("[]", "a plan is a JSON object, got list"),
        ("3", "a plan is a JSON object, got int"),
    ],
)
def test_what_is_no_json_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def segments(number: int, *parts: tuple[str, int, int]) -> dict[str, Any]:
    return edited(buckets=bucket(number, segments=parts))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (edited(world=8), "the plan is for 8 ranks, this job has 4; make a plan for it"),
        (edited(model="0" * 64), "made for model 000000000000, this model is " + model_digest(SPECS)[:12]),
        (edited(buckets=bucket(2, id="0")), "several buckets with the id '0'"),
        (segments(3, ("other", 0, 4)), "bucket '3' names 'other', which is no parameter to synchronise here"),
        (segments(3, ("half", 0, 5)), r"bucket '3': segment \[0, 5\) is outside of 'half', which has 4 elements"),
        (segments(3, ("half", -1, 4)), r"segment \[-1, 4\) is outside of 'half'"),
        (segments(3, ("half", 2, 2)), r"segment \[2, 2\) is outside of 'half'"),
        (segments(3, ("half", 3, 1)), r"segment \[3, 1\) is outside of 'half'"),
        (segments(2, ("w", 4, 12), ("empty", 0, 0)), r"segments of 'w' overlap: \[4, 12\) begins before 5"),
        (segments(3, ("half", 0, 4), ("half", 0, 4)), r"segments of 'half' overlap: \[0, 4\) begins before 4"),
        (segments(2, ("w", 6, 12), ("empty", 0, 0)), r"leaves elements \[5, 6\) of 'w' out"),
        (segments(2, ("w", 5, 11), ("empty", 0, 0)), r"leaves elements \[11, 12\) of 'w' out; every parameter needs"),
        (
            segments(2, ("w", 5, 12), ("empty", 0, 0), ("empty", 0, 0)),
            "the plan has 2 segments of 'empty', which has no elements; expected one",
        ),
        (segments(2, ("w", 5, 12)), r"leaves elements \[0, 0\) of 'empty' out; every parameter needs a bucket"),
        (edited(buckets=edited()["buckets"][:3], order=[]), r"leaves elements \[0, 4\) of 'half' out"),
        (segments(2, ("w", 5, 12), ("empty", 0, 0), ("half", 0, 4)), "bucket '2' mixes dtypes .*give each its own"),
        (segments(1, ("table", 0, 20)), "bucket '1': a row-sparse table is not cut"),
        (edited(buckets=bucket(1, segments=[])), "bucket '1' needs segments"),
        (
            edited(buckets=bucket(1, scheme={"agsparse": {"capacity": [5, 5], "same_rows": [0, 0]}})),
            "bucket '1': the scheme is planned for 2 tables, the bucket has 1",
        ),
        (
            edited(buckets=bucket(0, scheme={"shuffled": {"rounds": [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]}})),
            "bucket '0': shuffled is for parameters",
        ),
        (edited(order=[*edited()["order"], ["9", "push"]]), "order names bucket '9', which the plan does not have"),
        (edited(order=edited()["order"][1:]), r"gives bucket '0' the stages \[\], not \['all_reduce'\]"),
        (
            edited(order=[[i, "pull" if s == "push" else s] for i, s in edited()["order"]]),
            r"gives bucket '1' the stages \['sizes', 'pull', 'pull'\], not \['sizes', 'push', 'pull'\]",
        ),
        (
            edited(order=[*edited()["order"], ["3", "all_reduce"]]),
            r"gives bucket '3' the stages \['all_reduce', 'all_reduce'\], not \['all_reduce'\]",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_job_says_what_does_not(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(data).check(SPECS, 4)


@pytest.mark.parametrize("stages", [(), ("",), ("push", ""), ("push", "finish")])
def test_a_scheme_whose_buckets_would_have_no_turn_is_refused(
    stages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllReduce, "stages", lambda self, size: stages)
    specs = {"b": SPECS["b"]}
    plan = Plan.from_json(Plan.make(specs, 2, [(["b"], AllReduce())]).to_json())
    told = rf"bucket '0': the scheme all_reduce has the stages {re.escape(str(list(stages)))} on 2 ranks; expected at "
    with pytest.raises(ValueError, match=told):
        plan.check(specs, 2)


@pytest.mark.parametrize(
    "other",
    [
        {**SPECS, "more": TensorSpec((1,), torch.float32)},
        {k: v for k, v in SPECS.items() if k != "half"},
        {**SPECS, "b": TensorSpec((6,), torch.float16)},
        {**SPECS, "w": TensorSpec((2, 6), torch.float32)},
    ],
    ids=["one more", "one less", "dtype", "shape"],
)
def test_another_model_is_refused(other: dict[str, TensorSpec]) -> None:
    with pytest.raises(ValueError, match="the plan|bucket"):
        make().check(other, 4)


def test_plans_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().world = 3


def test_an_order_may_be_given_and_is_kept() -> None:
    order = [("0", "sizes"), ("0", "push"), ("0", "pull"), ("1", "all_reduce")]
    specs = {"table": SPECS["table"], "b": SPECS["b"]}
    plan = Plan.make(specs, 2, [(["table"], BalancedParallelism()), (["b"], AllReduce())], order)
    assert list(plan.order) == order
    plan.check(specs, 2)


@given(st.lists(st.sampled_from([AllReduce(), AGSparse(), BalancedParallelism()]), max_size=6))
def test_the_default_order_gives_each_bucket_its_stages_and_first_stages_first(schemes: list[Any]) -> None:
    specs = {f"p{i}": TensorSpec((4, 2), torch.float32) for i in range(len(schemes))}
    plan = Plan.make(specs, 2, [([name], scheme) for name, scheme in zip(specs, schemes, strict=True)])
    plan.check(specs, 2)
    order = default_order(plan.buckets, 2)
    assert tuple(order) == plan.order
    stages = {b.id: b.scheme.stages(2) for b in plan.buckets}
    levels = [stages[i].index(stage) for i, stage in order]
    assert levels == sorted(levels)


def test_buckets_are_seen_as_their_scheme_wants_them() -> None:
    flat, rows, *_ = (plan.bucket(SPECS) for plan in make().buckets)
    assert (flat.layout, flat.numel, flat.names) == (Layout.FLAT, 11, ["w", "b"])
    assert (rows.layout, rows.specs) == (Layout.ROWS, (SPECS["table"],))


def test_a_plan_is_described_in_words_a_line_a_bucket() -> None:
    big = {**SPECS, "w": TensorSpec((500, 1000), torch.float32)}
    plan = Plan.make(
        big,
        4,
        [(["w", "b", "empty"], AllReduce()), (["table"], BalancedParallelism()), (["half"], AllReduce())],
    )
    assert describe(plan, big, {"table": 0.0263}) == [
        "w ... empty (3 tensors), 2.00 MB -> all reduce",
        "table (2.63% dense) -> balanced parallelism, column stripe",
        "half, 0.00 MB -> all reduce",
    ]
    assert describe(plan, big)[1] == "table -> balanced parallelism, column stripe"
    with_room = Plan.make(big, 4, [(["table"], BalancedParallelism(capacity=(40,), same_rows=(0,)))])
    assert describe(with_room, big) == ["table -> balanced parallelism, capacity 40, same rows 0, column stripe"]
    resting = Shuffled((*[((0,), (1,))] * 3, ((0, 1),)))
    words = describe(Plan.make(big, 2, [(["table"], resting)], what=What.PARAMETER), big)
    assert words == ["table, 0.00 MB -> shuffled, rounds 3 x [[0], [1]] [[0, 1]], all reduce"]


@pytest.mark.parametrize(
    ("file", "digest"),
    [
        ("version_1_gradients.json", "800e10aa1d7b6a08548fcb7d03b4d5c2e7d467ffb3cbf1960c624c952cb81ab3"),
        ("version_1_parameters.json", "f9b17cc398f59980d74d46059668f7314dfbde9f1c4e10f2ebdd991326e86773"),
    ],
)
def test_plans_that_were_stored_when_schemes_were_dicts_are_read_and_written_alike(file: str, digest: str) -> None:
    stored = (Path(__file__).parent / "data" / file).read_text()
    plan = Plan.from_json(stored)
    assert plan.digest == digest
    assert plan.to_json() == stored
    assert Plan.make({}, 4, [((), bucket.scheme) for bucket in plan.buckets]).order == plan.order


def test_a_plan_from_before_a_scheme_had_a_setting_is_read() -> None:
    data = edited(buckets=bucket(1, scheme={"balanced_parallelism": {}}))
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    plan = read({**data, "digest": hashlib.sha256(canonical.encode()).hexdigest()})
    assert plan == make() and plan.digest == make().digest, "as if the setting had been written"


def test_schemes_are_read_once_and_only_those_that_a_plan_can_name() -> None:
    scheme = BalancedParallelism()
    plan = Plan.make(SPECS, 4, [(["table"], scheme)])
    assert plan.buckets[0].scheme is scheme
    assert hash(plan.buckets[0]) == hash(Plan.from_json(plan.to_json()).buckets[0])

    class Louder(AllReduce):
        pass

    with pytest.raises(ValueError, match="Louder is not registered"):
        Plan.make(SPECS, 4, [(["b"], Louder())])


@pytest.mark.parametrize("depth", [1000, 20_000])
def test_a_plan_that_is_nested_without_end_is_refused_as_a_plan(depth: int) -> None:
    opened, closed = '{"half_precision": {"values": "bfloat16", "inner": ' * depth, "}}" * depth
    bucket = f'{{"id": "0", "segments": [["w", 0, 1]], "scheme": {opened}{{"all_reduce": {{}}}}{closed}}}'
    with pytest.raises(ValueError, match="the plan is nested too deep"):
        Plan.from_json(f'{{"version": 1, "world": 2, "model": "", "order": [], "buckets": [{bucket}]}}')
