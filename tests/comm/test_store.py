"""Entries of the store are held to types: one that another program wrote is an error that names the key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import gradsync
from gradsync.comm import GroupError, torch_group
from gradsync.comm.board import Failure
from gradsync.comm.distributed import TorchGroup
from gradsync.comm.group import Group
from gradsync.comm.rendezvous import Entry, _Rendezvous
from gradsync.comm.store import ANSWER_S, StoreClient, by_rank, from_json, patience
from gradsync.comm.survivors import Survivors
from tests.frontends.models import Perceptron
from tests.world import Ranks

Worlds = Callable[[int], Ranks]
TIMEOUT_S = 20.0
UNREADABLE = "in the store of torch.distributed cannot be read: another version of gradsync or another program wrote"


def in_hex(value: object) -> str:
    return json.dumps(value).encode().hex()


# Values of keys to which ranks append entries.
NO_ENTRIES = ["\ufffd", "words", "1", "1: ", "x:1 ", "1:1:1:1:1:1 ", "1:7b22 ", f"1:{in_hex({'a': '1'})} ", "1:1.5 "]


def write(key: str, text: Any) -> None:
    distributed_c10d._get_default_store().set(key, text)


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(GroupError) as caught:
        call()
    return str(caught.value)


def wait_beside(notice: str, text: str) -> tuple[str, float]:
    """Rank 1 waits for rank 0, which writes something else where notices stand."""
    group = torch_group(timeout_s=TIMEOUT_S, what="a test")
    assert isinstance(group, TorchGroup)
    told, began_s = "", time.monotonic()
    if group.rank == 0:
        write(f"{group._whereabouts.name}/{notice}", text)
    elif notice == "barrier 0":
        told = raised(lambda: group.barrier("a load", TIMEOUT_S))
    else:
        told = raised(lambda: _sum(group))
    waited_s = time.monotonic() - began_s
    dist.barrier()
    group.close()  # of which nothing keeps it
    gradsync.attach(Perceptron(), timeout=TIMEOUT_S).detach()
    return told, waited_s


def _sum(group: Group) -> None:
    group.all_reduce(torch.ones(1)).wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("notice", "text"),
    [
        ("failure", '{"by": 0}'),
        ("failure", '[0, [0], "why"'),
        ("failure", '["0", [0], "why", []]'),
        ("failure", '"four"'),
        ("left", "0:now "),
        ("left", "0 "),
        ("barrier 0", "0:0:6c6f6164 "),
        ("barrier 0", "0:0:6c6f6:64 "),
    ],
)
def test_a_notice_that_is_none_ends_the_wait_with_an_error(world: Worlds, notice: str, text: str) -> None:
    told, waited_s = world(2).run(wait_beside, notice, text, limit_s=60)[1]
    assert UNREADABLE in told and f"/{notice}'" in told and text[:9] in told, told
    assert waited_s < TIMEOUT_S / 2


def meet_beside(text: str, key: str) -> str:
    """Ranks attach where something else stands in their place; then the place is free."""
    rendezvous = _Rendezvous(None, "a test")
    place = {"here": rendezvous._key, "given up": rendezvous._key_of_given_up}[key]
    if dist.get_rank() == 0:
        write(place, text)
    dist.barrier()
    told = ""
    if dist.get_rank() == 1 or key == "here":  # two that have met do not look who gave up
        told = raised(lambda: gradsync.attach(Perceptron(), timeout=TIMEOUT_S))
    dist.barrier()
    if dist.get_rank() == 0:
        distributed_c10d._get_default_store().delete_key(place)
    dist.barrier()
    gradsync.attach(Perceptron(), timeout=TIMEOUT_S).detach()
    return told


OF_ANOTHER_VERSION = f"1:{in_hex(['0', 'attach()', '9.0', 'node', 'what came later'])} "


@pytest.mark.parametrize("key", ["here", "given up"])
@pytest.mark.parametrize("text", ["words ", OF_ANOTHER_VERSION, f"1:{in_hex([0, 1, 2, 3])} ", OF_ANOTHER_VERSION[:-3]])
def test_an_entry_of_another_version_ends_a_rendezvous(world: Worlds, text: str, key: str) -> None:
    found = world(2).run(meet_beside, text, key, limit_s=60)
    for told in found if key == "here" else found[1:]:
        assert UNREADABLE in told and key in told, told


def agree_beside(text: str) -> str:
    survivors = Survivors("test", None, timeout_s=TIMEOUT_S)
    if dist.get_rank() == 0:
        write("test/here 0", text)
    dist.barrier()
    told = raised(lambda: survivors.agree(1)) if dist.get_rank() == 1 else ""
    dist.barrier()
    survivors.close()
    return told


def test_survivors_do_not_wait_beside_another_entry(world: Worlds) -> None:
    told = world(2).run(agree_beside, "0:none ", limit_s=60)[1]
    assert told.startswith("ranks were lost, and the entry ") and UNREADABLE in told


def read_bytes() -> str:
    write("bytes", b"1:1 \xff\xfe")
    return raised(lambda: by_rank("bytes", StoreClient().read("bytes"), int))


def test_bytes_that_are_no_text_are_no_silence_of_the_store(world: Worlds) -> None:
    assert UNREADABLE in world(1).run(read_bytes)[0]


@pytest.mark.parametrize("text", NO_ENTRIES)
@pytest.mark.parametrize("kind", [Entry, dict[str, int], Failure], ids=str)
def test_entries_of_another_form_name_the_key(kind: object, text: str) -> None:
    with pytest.raises(GroupError, match=f"'here' {UNREADABLE}"):
        by_rank("here", text, lambda field: from_json(kind, bytes.fromhex(field)))


def test_of_several_entries_of_a_rank_only_the_last_is_read() -> None:
    assert by_rank("here", "1:old 0:5 1:6 ", int) == {1: 6, 0: 5}
    assert by_rank("here", None, int) == {}


def tell_a_failure() -> str:
    group = torch_group(timeout_s=TIMEOUT_S, what="a test")
    if group.rank == 0:
        group.announce_failure("no file named \udcff")
    told = raised(lambda: _sum(group)) if group.rank == 1 else ""
    dist.barrier()
    group.close()
    return told


def test_a_failure_with_half_of_a_character_is_told(world: Worlds) -> None:
    assert world(2).run(tell_a_failure, limit_s=60)[1] == "rank 0: no file named ?"


class _Slow:
    """Stands for a store that takes a time for each answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, 0

    def clone(self) -> _Slow:
        return self

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.asked += 1
        time.sleep(self.seconds)
        return b"here"


def test_questions_to_a_slow_store_share_the_patience_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow(0.2 * ANSWER_S)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: slow)
    client = StoreClient()
    began_s = time.monotonic()
    with patience(ANSWER_S / 2):
        found = [client.read(f"key {number}") for number in range(20)]
    waited_s = time.monotonic() - began_s
    assert found[0] == "here" and found[-1] is None and 2 <= slow.asked < 10, "patience ended"
    assert waited_s < 20 * 0.2 * ANSWER_S, "all of them would take so long"
    assert client.ask(lambda store: store.asked, urgent=True) == slow.asked, "afterwards each has its own time again"
