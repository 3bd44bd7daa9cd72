"""Profiles on disk: reading gives what was written, bad values are refused by name, and planners get their inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.costs.cluster import Link
from gradsync.costs.cost_model import KernelCost
from gradsync.costs.steps import Compute
from gradsync.planner import default_plans
from gradsync.planner.default.network import Network
from gradsync.plans.profile import HostEstimate, Interval, Profile, Span, describe_profile
from gradsync.tensors.bucket import TensorSpec
from tests.profiles import READY_S, ROWS, SPECS, make_profile

Data = dict[str, Any]
NOTHING = {"value": 0, "low": 0, "high": 0}


def edited(change: Callable[[Data], object]) -> str:
    """The profile as JSON without its digest, changed by hand."""
    data: Data = json.loads(make_profile().to_json())
    del data["digest"]
    change(data)
    return json.dumps(data)


def test_json_round_trip_keeps_everything(tmp_path: Path) -> None:
    profile = make_profile()
    assert Profile.from_json(profile.to_json()) == profile
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile and loaded.digest == profile.digest
    assert loaded.to_json() == profile.to_json()


def test_costs_of_the_host_are_kept_and_go_to_cost_models() -> None:
    known = make_profile().kernels
    host = HostEstimate(fetch=known["sum_rows"], send=known["sum_rows"], kernels=known)
    profile = make_profile(device="cuda", card="a card", host=host)
    assert Profile.from_json(profile.to_json()) == profile
    cost = profile.cost_model().host
    assert cost is not None and cost.kernels == make_profile().cost_model().kernels
    assert make_profile().cost_model().host is None
    words = "\n".join(describe_profile(profile))
    assert "a card" in words and "copies to the device" in words and "the host's kernels" in words


def test_json_has_a_parameter_a_line() -> None:
    lines = make_profile().to_json().splitlines()
    for name in SPECS:
        assert sum(f'"name": "{name}"' in line for line in lines) == 1


def test_planners_get_the_gradients_as_they_were_seen() -> None:
    seen = {p.name: p for p in make_profile().parameter_profiles()}
    assert list(seen) == list(SPECS)
    assert {name: p.tensor for name, p in seen.items()} == SPECS
    assert seen["table"].sparse and seen["table"].density == ROWS
    assert sorted(seen, key=lambda name: seen[name].position) == sorted(READY_S, key=READY_S.__getitem__)
    assert [p.name for p in make_profile().in_ready_order()] == ["b", "w", "table"]


def test_planners_get_the_costs_of_links_and_kernels() -> None:
    cost = make_profile().cost_model()
    assert (cost.alpha_s, cost.stage_s, cost.transport.at_once_bytes) == (3e-4, 2e-3, 262144.0)
    assert cost.bandwidth_bytes_per_s == 2 * 1e7  # both ranks of a node send at once
    assert cost.intra == Link(1e9, 1e-5)
    assert cost.kernels == {"sum_rows": KernelCost(1e-4, 1e-9, 4096.0)}
    assert cost.seconds(Compute("sum_rows", 3 * 4096.0, calls=2)) == pytest.approx(2e-4 + 4096e-9)
    assert cost.seconds(Compute("sum_rows", 4096.0, calls=2)) == 2e-4


def test_ranks_of_one_node_have_the_links_that_all_ranks_have() -> None:
    profile = make_profile(nodes=(0, 0, 0, 0), links=make_profile().links[:1])
    cost = profile.cost_model()
    assert (cost.alpha_s, cost.bandwidth_bytes_per_s, cost.intra) == (1e-4, 2e7, None)
    with pytest.raises(ValueError, match="no groups 'across'"):
        profile.link(Span.ACROSS)


def test_one_rank_has_no_links() -> None:
    cost = make_profile(world=1, nodes=(0,), links=()).cost_model()
    assert (cost.alpha_s, cost.bandwidth_bytes_per_s) == (0.0, inf)


def test_a_plan_can_be_made_of_a_profile() -> None:
    profile = make_profile()
    profile.check(SPECS, 4)
    for plan in default_plans(profile.parameter_profiles(), 4, Network.of(profile)):
        plan.check(SPECS, 4)


def set_ready(data: Data, median_s: float) -> None:
    data["parameters"][1]["ready"]["median_s"] = median_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: set_ready(d, 0.0), r"parameters\.1\.ready\.median_s: Input should be greater than 0"),
        (lambda d: d["parameters"][1].pop("ready"), r"parameters\.1\.ready: Field required"),
        (lambda d: set_ready(d, 0.03), "'w' is ready after 0.03 s, when backward has ended"),
        (lambda d: d["parts"]["backward"].update(median_s=0.0), r"parts\.backward\.median_s"),
        (lambda d: d["parts"]["forward"].update(median_s=float("nan")), r"parts\.forward\.median_s"),
        (lambda d: d["parts"]["optimizer"].update(median_s=-1.0), r"parts\.optimizer\.median_s"),
        (
            lambda d: d["links"][2]["link"]["bandwidth_bytes_per_s"].update(value=-1e7),
            r"links\.2\.link\.bandwidth_bytes_per_s\.value: .* greater than or equal to 0",
        ),
        (
            lambda d: d["links"][0]["link"].update(bandwidth_bytes_per_s=NOTHING),
            r"links\.0\.link\.bandwidth_bytes_per_s: .* must be positive",
        ),
        (
            lambda d: d["kernels"]["sum_rows"]["call_s"].update(low=1.0),
            r"kernels\.sum_rows\.call_s: .* must lie in its interval",
        ),
        (
            lambda d: d["kernels"]["sum_rows"].update(call_s=NOTHING, byte_s=NOTHING),
            "every kernel takes time",
        ),
        (lambda d: d.update(colour="red"), "colour: Extra inputs are not permitted"),
        (lambda d: d["links"][0].update(mtu=1500), r"links\.0\.mtu: Extra"),
        (lambda d: d["links"].pop(), "links must have the spans"),
        (lambda d: d.update(nodes=[0, 0, 1]), "nodes must name the node of each of the 4 ranks, got 3"),
        (lambda d: d["parameters"][0].update(position=0), "positions of the 3 parameters must be 0 to 2"),
        (lambda d: d["parameters"][0].update(dtype="float31"), "no dtype 'float31'"),
        (lambda d: d["parameters"][0].update(shape=[999, 4]), "model digest is"),
        (lambda d: d.update(version=1), "version"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: Callable[[Data], object], message: str) -> None:
    Profile.from_json(edited(lambda data: None))
    with pytest.raises(ValueError, match=message):
        Profile.from_json(edited(change))


def test_other_files_and_edits_by_hand_are_refused() -> None:
    with pytest.raises(ValueError, match="no JSON"):
        Profile.from_json("version 1")
    with pytest.raises(ValueError, match="a profile is a JSON object, got list"):
        Profile.from_json("[]")
    text = make_profile().to_json()
    with pytest.raises(ValueError, match="was changed after it was written"):
        Profile.from_json(text.replace('"steps": 10', '"steps": 11'))


def test_another_job_is_refused() -> None:
    profile = make_profile()
    with pytest.raises(ValueError, match="is of 4 ranks, this job has 8; measure again"):
        profile.check(SPECS, 8)
    other = {**SPECS, "w": TensorSpec((6, 3), torch.float32)}
    with pytest.raises(ValueError, match="'w' is 6x2 float32 in the profile, 6x3 float32 here"):
        profile.check(other, 4)
    with pytest.raises(ValueError, match="another order"):
        profile.check(dict(reversed(SPECS.items())), 4)
    older = make_profile(torch="1.0.0")
    with pytest.raises(ValueError, match=r"measured with torch 1\.0\.0, this is"):
        older.check(SPECS, 4)


def test_a_profile_is_described_in_words() -> None:
    text = "\n".join(describe_profile(make_profile(kernels={})))
    assert "3 parameters, 4 ranks on 2 nodes" in text
    assert "a step without communication: 35.00 ms over 10 steps" in text and "backward 20.00 +- 2.00 ms" in text
    assert "from 5.00 +- 0.10 ms (b) to 20.00 +- 0.10 ms (table)" in text
    assert "across, 2 members: 80mbit [72mbit-96mbit]" in text
    assert "backward by transfer: x 1.3 [1.17-1.56]" in text


def test_what_nothing_is_known_of_has_no_upper_end() -> None:
    assert Interval(value=1.0, low=0.0, high=None).high is None
    with pytest.raises(ValueError, match="must lie in its interval"):
        Interval(value=1.0, low=2.0, high=None)
