"""Files from elsewhere end in an error that names the file, whatever they hold, or are read as they are meant."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradsync import Cluster, Plan
from gradsync.inputs.files import MOST_BYTES, MOST_DEPTH, from_json, from_toml, read_text
from gradsync.plans.document import Document
from gradsync.plans.observations import Observations
from gradsync.plans.profile import Profile
from gradsync.schemes import AllReduce
from tests.profiles import SPECS, make_profile

PLAN = Plan.make(SPECS, 4, [(["table"], AllReduce()), (["w"], AllReduce()), (["b"], AllReduce())])
OBSERVATIONS = Observations.of(make_profile().parameter_profiles(), PLAN.digest, 1)
DOCUMENTS: dict[type[Document], Document] = {Plan: PLAN, Profile: make_profile(), Observations: OBSERVATIONS}
CLUSTER = 'nodes = 4\nlink = "1gbit"\n'

# Contents of any file of JSON, and the error's text.
NO_TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no JSON"),
    "blank": (b" \n", "no JSON"),
    "words": (b"hello", "no JSON"),
    "every byte": (bytes(range(256)), "not UTF-8"),
    "UTF-16": ("{}".encode("utf-16"), "not UTF-8"),
    "Latin-1": (b'{"a": "\xe4"}', r"not UTF-8 text \(0xe4 at byte 7\)"),
    "byte order mark": (b"\xef\xbb\xbf{}", "no JSON"),
    "NULs": (b"\0" * 100, "no JSON"),
    "pickle": (b"\x80\x04\x95\x1a\x00", "not UTF-8"),
    "a list": (b"[]", "is a JSON object, got list"),
    "a text": (b'"plan"', "is a JSON object, got str"),
    "nothing": (b"null", "is a JSON object, got NoneType"),
    "open lists": (b"[" * 100_000, "nested too deep"),
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deep"),
    "a little too deep": (b'{"a":' * 80 + b"1" + b"}" * 80, "nested too deep"),
    "a key twice": (b'{"version": 1, "version": 1}', "the key 'version' twice"),
    "a key twice inside": (b'{"version": 1, "a": [{"b": 1, "b": 2}]}', "the key 'b' twice"),
    "many digits": (b'{"version": ' + b"9" * 5000 + b"}", "4300 digits"),
    "more than 64 bits": (b'{"version": 1, "a": [0, 18446744073709551616]}', r"field a\.1: .*64 bits"),
    "no number": (b'{"version": 1, "a": {"b": NaN}}', r"field a\.b: a number must be finite, got nan"),
    "beyond all floats": (b'{"version": 1, "a": -1e400}', "field a: a number must be finite, got -inf"),
    "half of a character": (b'{"version": 1, "\\ud800": 1}', "Invalid JSON: .*escape"),
    "no version": (b"{}", "field version: Field required"),
}


def changed(document: Document, change: Callable[[dict[str, Any]], object]) -> bytes:
    data = json.loads(document.to_json())
    del data["digest"]
    change(data)
    return json.dumps(data).encode()


def put(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field, by its path, as `links.0.size`."""

    def change(data: Any) -> None:
        *path, last = (int(key) if key.isdecimal() else key for key in place.split("."))
        for key in path:
            data = data[key]
        data[last] = value

    return change


# Fields and values that look like what belongs there.
NO_FIELDS: list[tuple[type[Document], str, tuple[Any, ...]]] = [
    (Plan, "version", (1.0, True, "1", None, 2, 0)),
    (Plan, "world", ("4", 4.0, True, None, 0, -1, 10**9, 1 << 63)),
    (Plan, "model", (5, None, ["m"])),
    (Plan, "order", (None, {}, "0", [["0"]], [[0, "all_reduce"]], [["0", "all_reduce", "x"]])),
    (Plan, "buckets", (None, {}, "", [[]])),
    (Plan, "buckets.0.id", (0, None, True)),
    (Plan, "buckets.0.what", (1, None, "gradients", True)),
    (Plan, "buckets.0.segments", (None, [["table", 0]], [["table", 0, "4000"]], [["table", 0, 4000.0]])),
    (Plan, "buckets.0.segments.0", (["table", False, True], [None, 0, 1], ["table", 0, 1, 2], "table")),
    (Plan, "buckets.0.scheme", (None, "all_reduce", [], {}, {"__class__": {}}, {"all_reduce": {"__init__": 1}})),
    (Profile, "version", (2.0, True, "2", None, 1)),
    (Profile, "threads", ("1", 1.0, True, 0, 10**10)),
    (Profile, "steps", ("1", 1.0, True, 0, 10**10)),
    (Profile, "world", ("4", 4.0, True, 0, 10**9)),
    (Profile, "nodes", (None, "0011", [0, 0, 1, "1"], [0, 0, 1, 1.0], [0, 0, -1, -1], [False, False, True, True])),
    (Profile, "parts.forward.median_s", ("0.01", True, None, -1, 0, 1e7, 1e308)),
    (Profile, "parts.optimizer.spread_s", ("0", False, None, -1, 1e308)),
    (Profile, "overlap.backward_by_transfer.high", ("2", True, -1, 1e7, 1e308)),
    (Profile, "links.0.size", ("4", 4.0, True, 1, 10**9)),
    (Profile, "links.0.at_once_bytes", ("1", True, None, -1, 1e19)),
    (Profile, "links.0.link.alpha_s.value", ("0", True, None, -1, 1e7)),
    (Profile, "links.0.link.bandwidth_bytes_per_s.high", ("1e9", True, -1, 1e16)),
    (Profile, "links.0.collectives.all_gather.points.0.rounds", ("1", 1.0, True, 0)),
    (Profile, "links.0.collectives.all_gather.points.0.busiest_bytes", ("1", True, None, 0, 1e19)),
    (Profile, "kernels.sum_rows.byte_s.high", ("1", True, -1, 2.0)),
    (Profile, "kernels.sum_rows.knee_bytes", ("1", True, None, -1, 1e19)),
    (Profile, "parameters.0.name", (0, None, True)),
    (Profile, "parameters.0.shape", ("1000", [1000, "4"], [1000, 4.0], [True, 4], [-1, 4])),
    (Profile, "parameters.0.dtype", (32, None, "int", "nn")),
    (Profile, "parameters.0.sparse", (1, "true", None)),
    (Profile, "parameters.0.position", ("0", 0.0, True, -1)),
    (Profile, "parameters.0.rows.rows", ("1", True, None, -1, 1e9)),
    (Profile, "parameters.0.rows.most_rows", ("1", True, None, -1, 1e9)),
    (Profile, "parameters.0.rows.shares", ([2.0], [-0.5], ["1"], 1)),
    (Profile, "parameters.0.errors", ({"top_k": 1e10}, {"top_k": -1}, {"top_k": "1"}, [0.5])),
    (Observations, "plan", (0, None, True)),
    (Observations, "steps_left", ("1", 1.0, True, None, -1)),
    (Observations, "parameters.0.rows.rows", ("1", True, None, -1, 1e9)),
]
EACH = [(kind, place, value) for kind, place, values in NO_FIELDS for value in values]


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.noun)
@pytest.mark.parametrize(("content", "message"), NO_TEXTS.values(), ids=NO_TEXTS)
def test_what_is_no_document_is_refused_with_the_file(
    tmp_path: Path, kind: type[Document], content: bytes, message: str
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*({message})") as caught:
        kind.load(path)
    assert type(caught.value) is ValueError, "no error of a decoder or parser"


@pytest.mark.parametrize(("kind", "place", "value"), EACH, ids=[f"{k.noun}-{p}={str(v)[:30]}" for k, p, v in EACH])
def test_a_field_of_another_type_or_out_of_bounds_is_named(
    tmp_path: Path, kind: type[Document], place: str, value: Any
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(changed(DOCUMENTS[kind], put(place, value)))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: ") as caught:
        kind.load(path)
    named = re.search(r"field ([\w.]+)|the profile's (model)|'(w)' is ready", str(caught.value))
    assert named, caught.value
    found = next(filter(None, named.groups()))
    assert found in ("profile", "model", "w") or place.startswith(found) or found.startswith(place), caught.value


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.noun)
@pytest.mark.parametrize("digest", [None, "", "0" * 64, 1, [1], False])
def test_a_digest_that_is_there_must_be_right(kind: type[Document], digest: Any) -> None:
    text = changed(DOCUMENTS[kind], put("digest", digest)).decode()
    with pytest.raises(ValueError, match="was changed after it was written"):
        kind.from_json(text)


LEGAL: list[tuple[type[Document], str, Any]] = [  # as docs/reference/files.md lists them
    (Plan, "buckets.0.scheme", {"compressed_all_gather": {"compressor": {"top_k": {"ratio": 1e-300}}}}),
    (Profile, "parts.backward.spread_s", 0),
    (Profile, "parts.optimizer.median_s", 0),
    (Profile, "links.0.at_once_bytes", 0),
    (Profile, "links.0.link.stage_s", {"value": 0, "low": 0, "high": None}),
    (Profile, "kernels.sum_rows.byte_s.low", 0),
    (Profile, "kernels.sum_rows.knee_bytes", 0),
    (Profile, "parameters.0.errors", {"top_k": 0}),
]


@pytest.mark.parametrize(("kind", "place", "value"), LEGAL, ids=[f"{k.noun}-{p}" for k, p, _ in LEGAL])
def test_what_the_page_calls_legal_is_read(kind: type[Document], place: str, value: Any) -> None:
    read = kind.from_json(changed(DOCUMENTS[kind], put(place, value)).decode())
    assert read.digest != DOCUMENTS[kind].digest or value == 0


NO_CLUSTERS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "'nodes' is missing"),
    "no TOML": ("x = = 3", "the cluster is no TOML"),
    "JSON": ('{"nodes": 4}', "the cluster is no TOML"),
    "bytes": (bytes(range(128, 256)), "not UTF-8"),
    "UTF-16": (CLUSTER.encode("utf-16"), "not UTF-8"),
    "NUL": ("nodes = 4\0", "the cluster is no TOML"),
    "a key twice": ("nodes = 4\nnodes = 4\n", "the cluster is no TOML"),
    "deep": ("nodes = " + "[" * 5000 + "]" * 5000, "nested too deep|no TOML"),
    "a little deep": ("nodes = " + "[" * 80 + "]" * 80, "nested too deep"),
    "many digits": ("nodes = " + "9" * 5000, "no TOML: .*4300 digits"),
    "more than 64 bits": ("nodes = 99999999999999999999", "field nodes: .*64 bits"),
    "infinite": ('nodes = inf\nlink = "1gbit"', "field nodes: a number must be finite"),
    "10^9 nodes": ('nodes = 1000000000\nlink = "1gbit"', "Cluster.nodes .* at most 131072 ranks"),
    "10^8 ranks": (CLUSTER + "ranks_per_node = 100000000", "at most 131072 ranks"),
    "a date": (CLUSTER + "rack_size = 2026-01-01", "rack_size must be a whole number"),
    "rack_size true": (CLUSTER + 'rack_size = true\ntrunk = "1gbit"', "rack_size must be a whole number"),
    "a rate of 400 digits": ('nodes = 4\nlink = "' + "9" * 400 + 'gbit"', "link: a link rate .* 8000tbit"),
    "hardly a rate": ('nodes = 4\nlink = "0.000000001bit"', "link: a link rate .* 1bit to"),
    "endless latency": ('nodes = 4\nlink = { rate = "1gbit", latency = "' + "9" * 400 + 's" }', "at most 1000s"),
    "other digits": (CLUSTER + 'slow = { "\u0663" = "1gbit" }', "slow must look like"),
    "a slow node twice": (CLUSTER + 'slow = { 1 = "1gbit", 01 = "1gbit" }', "slow must look like"),
    "a slow node of 5000 digits": (CLUSTER + "slow = { " + "1" * 5000 + ' = "1gbit" }', "slow must look like"),
}


@pytest.mark.parametrize(("content", "message"), NO_CLUSTERS.values(), ids=NO_CLUSTERS)
def test_what_is_no_cluster_is_refused_with_the_file(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"(?s)^{re.escape(str(path))}: .*({message})") as caught:
        Cluster.load(path)
    assert type(caught.value) is ValueError and len(str(caught.value)) < 600, "texts of any length are cut"


@pytest.mark.parametrize("rack_size", [3, 99])
def test_racks_may_be_uneven_and_larger_than_the_cluster(tmp_path: Path, rack_size: int) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'{CLUSTER}rack_size = {rack_size}\ntrunk = "1gbit"')
    assert Cluster.load(path).rack_size == rack_size


@pytest.mark.parametrize("load", [Plan.load, Profile.load, Cluster.load], ids=["plan", "profile", "cluster"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, load: Callable[[Any], object]) -> None:
    pipe, loop, large = tmp_path / "pipe", tmp_path / "loop", tmp_path / "large"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole, which takes no room
    for path, message in (
        (tmp_path, "it is a folder"),
        (tmp_path / "none", "there is no such file"),
        (pipe, "it is a pipe or device"),
        (Path("/dev/zero"), "it is a pipe or device"),
        (loop, "there is no such file|it cannot be read"),
        (tmp_path / ("x" * 300), "there is no such file|it cannot be read"),
        (large, "it is larger than"),
    ):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: ({message})"):
            load(path)
    with pytest.raises(ValueError, match="null byte|no such file"):
        load("a\0b")
    for wrong in (None, 3, b"plan.json", ["plan.json"]):
        with pytest.raises(TypeError, match="is read from a path, got"):
            load(wrong)


def test_a_file_that_grows_while_it_is_read_is_not_read_further(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 20)
    assert len(read_text(path, "plan", 20)) == 20
    with pytest.raises(ValueError, match="larger than 19 bytes, the most that a plan may have"):
        read_text(path, "plan", 19)


def test_nesting_up_to_the_bound_and_numbers_of_64_bits_are_read() -> None:
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert json.dumps(from_json(deep, "text")) == deep
    with pytest.raises(ValueError, match="nested too deep"):
        from_json(f"[{deep}]", "text")
    for whole in (-(1 << 63), (1 << 64) - 1):
        assert from_json(f"[{whole}]", "text") == [whole]
    for whole in (-(1 << 63) - 1, 1 << 64):
        with pytest.raises(ValueError, match="64 bits"):
            from_json(f"[{whole}]", "text")
        assert from_json(f"[{whole}]", "text", any_number=True) == [whole]
    assert from_toml("a = 1", "text") == {"a": 1}


@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 500_000,
        "{" + ",".join(f'"{n}":0' for n in range(100_000)) + ',"99999":0}',
        "[" + "[]," * 300_000 + "[]]",
    ],
    ids=["open text", "many keys", "many lists"],
)
def test_large_texts_take_time_by_their_length(text: str) -> None:
    began = time.perf_counter()
    try:
        from_json(text, "text")
    except ValueError:
        pass
    assert time.perf_counter() - began < 5
