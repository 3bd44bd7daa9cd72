"""The rendezvous of ranks in the store of `torch.distributed`, before they make communicators with each other.

Making a communicator blocks until all of its members do so, and says neither who is missing nor why. So the members
first write into the store that they have come, for what, and with which version of gradsync. A rendezvous ends once all
members have seen the same entries. Entries of an earlier job do no harm: an entry has a random number, and a rank that
is gone does not see the numbers of those that come now. A rank that gives up tells those that it has seen for whom it
waited, so that they do not take it for the one that is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..costs.cluster import Placement
from .board import Board, Came, require_one_purpose
from .errors import GroupError, ranks_in_words
from .store import NO_STORE, StoreClient, by_rank, from_json, reading, value

logger = logging.getLogger(__name__)

VERSION: str = sys.modules["gradsync"].__version__  # an import of the package would be a circle
POLL_S = (0.002, 0.2)  # pauses between two looks for the others: the first and the longest
POLL_OF_A_RANK_S = 0.004  # by which the longest pause grows with each rank, as each look reads all ranks' entries
DELETIONS = 20  # attempts to delete an entry while other ranks write theirs
WARNING_S = 30.0  # a rank that waits longer logs, once, for whom


class Meeting(NamedTuple):
    """The result of a rendezvous, to which all members of a process group have come.

    Attributes:
        name: a name that the members share and nobody else has, for their keys in the store.
        store: this member's connection to the store.
        placement: the node of each member, by host name and torchrun agent.
    """

    name: str
    store: StoreClient
    placement: Placement


class Entry(NamedTuple):
    """A rank's entry in the store at a rendezvous: its purpose `what`, version of gradsync and node.

    `nonce` is a random number, by which entries of earlier jobs are told apart.
    """

    nonce: str
    what: str
    version: str
    node: str


def meet(process_group: dist.ProcessGroup | None, what: str, timeout_s: float) -> Meeting:
    """Waits until all ranks of the process group have called this for the same purpose `what`; returns what they share.

    Args:
        process_group: the members; None: all ranks.
        what: the purpose, for error messages, the same on all members.
        timeout_s: seconds to wait for the other members.

    Raises:
        GroupError: where a member does not come in time, comes for another purpose, or has another version of gradsync,
            or where the store does not answer.
    """
    rendezvous = _Rendezvous(process_group, what)
    try:
        found, name = rendezvous.wait(timeout_s)
    except BaseException:
        rendezvous.withdraw()
        raise
    try:
        _require_alike(found)
    except GroupError:
        board = Board(rendezvous.store, name)
        board.note_left(dist.get_rank(), 0)
        if board.left().keys() == found.keys():
            board.clear(0)
        rendezvous.store.close()
        raise
    nodes = list(dict.fromkeys(entry.node for entry in found.values()))
    return Meeting(name, rendezvous.store, Placement(tuple(nodes.index(entry.node) for entry in found.values())))


class _Rendezvous:
    def __init__(self, process_group: dist.ProcessGroup | None, what: str) -> None:
        self.store = StoreClient()
        self._members = dist.get_process_group_ranks(process_group)
        self._rank = dist.get_rank()
        self._what = what
        self._mine = Entry(secrets.token_hex(8), what, VERSION, _node())
        of = (process_group or distributed_c10d._get_default_group()).group_name
        self._place = f"gradsync/{of}/{_digest(str(self._members))}"
        self._seen: dict[str, dict[int, Entry]] = {}  # sets of all members' entries that this rank saw, by their name

    def wait(self, timeout_s: float) -> tuple[dict[int, Entry], str]:
        """Waits until all members have seen the same entries; returns these by rank, and a name made from them."""
        pause_s, longest_s = POLL_S[0], max(POLL_S[1], len(self._members) * POLL_OF_A_RANK_S)
        began_s = answered_s = time.monotonic()
        warned = False
        while True:
            found = self._entries()
            missing = [rank for rank in self._members if rank not in found]
            if not missing and found[self._rank] == self._mine:
                self._note_seen({rank: found[rank] for rank in self._members})
            for name, entries in self._seen.items():  # a member that has left the rendezvous has deleted the entries
                late = self._have_not_seen(name)
                if not late:
                    self._delete(entries)
                    self.store.delete(*(f"{other}/seen" for other in self._seen if other != name))
                    return entries, name
                missing = missing or late
            if found.get(self._rank) != self._mine:  # the first time, or another rank's deletion crossed the writing
                self.store.append(self._key, f"{self._rank}:{_written(self._mine)} ")
            now_s = time.monotonic()
            answered_s = now_s if found else answered_s
            if now_s - answered_s >= min(WARNING_S, timeout_s):
                raise GroupError(f"{self._what}: {NO_STORE}")
            if given_up := self._given_up():
                raise self._missing(given_up, timeout_s)
            if now_s - began_s >= timeout_s:
                self._give_up(found, missing)
                raise self._missing(missing, timeout_s)
            if not warned and now_s - began_s >= WARNING_S:
                waited_for = ranks_in_words(missing)
                logger.warning("waiting for %.0f s by now for %s to come to %s", WARNING_S, waited_for, self._what)
                warned = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def withdraw(self) -> None:
        """Deletes this rank's entry: the others see that it does not wait any longer."""
        self._delete({self._rank: self._mine})
        self.store.delete(*(f"{name}/seen" for name in self._seen))
        self.store.close()

    def _missing(self, ranks: Sequence[int], timeout_s: float) -> GroupError:
        return GroupError(
            f"{ranks_in_words(ranks)} did not come to {self._what} within {timeout_s:.0f} s: all ranks of the process "
            "group must",
            ranks,
        )

    @property
    def _key(self) -> str:
        return f"{self._place}/here"

    @property
    def _key_of_given_up(self) -> str:
        return f"{self._place}/given up"

    def _give_up(self, found: Mapping[int, Entry], missing: Sequence[int]) -> None:
        """Tells the ranks of the entries in `found` that this rank does not wait for the `missing` any longer."""
        told = json.dumps([missing, [entry.nonce for entry in found.values()]]).encode().hex()
        self.store.append(self._key_of_given_up, f"{told} ")

    def _given_up(self) -> list[int]:
        """Returns the ranks for which a rank that has seen this one's entry waited in vain; empty if there are none."""
        told = self.store.read(self._key_of_given_up)
        with reading(self._key_of_given_up, told):
            for text in (told or "").split():
                missing, nonces = from_json(tuple[list[int], list[str]], bytes.fromhex(text))
                if self._mine.nonce in nonces:
                    return list[int](missing)
        return []

    def _entries(self) -> dict[int, Entry]:
        """Returns each rank's last entry; empty where the store does not answer."""
        return by_rank(self._key, self.store.read(self._key), lambda text: from_json(Entry, bytes.fromhex(text)))

    def _note_seen(self, entries: dict[int, Entry]) -> None:
        """Notes that this rank has seen these entries, one of each member."""
        self._seen[f"{self._place}/{_digest(' '.join(entry.nonce for entry in entries.values()))}"] = entries

    def _have_not_seen(self, name: str) -> list[int]:
        """Writes that this rank has seen the entries of this name; returns the members that have not yet."""
        have = by_rank(f"{name}/seen", self.store.read(f"{name}/seen"), lambda: None)
        if self._rank not in have:  # also where the store did not answer before
            self.store.append(f"{name}/seen", f"{self._rank} ")
        return [rank for rank in self._members if rank not in have]

    def _delete(self, entries: dict[int, Entry]) -> None:
        """Deletes these entries, and no newer ones, from the store."""
        gone = {f"{rank}:{_written(entry)}" for rank, entry in entries.items()}

        def delete(store: distributed_c10d.Store) -> None:
            for _ in range(DELETIONS):
                text = value(store, self._key)
                left = "".join(f"{each} " for each in text.split() if each not in gone)
                if not left:
                    store.delete_key(self._key)
                    store.delete_key(self._key_of_given_up)
                if not left or left == text or store.compare_set(self._key, text, left).decode() == left:
                    return

        self.store.ask(delete, urgent=True)


def _written(entry: Entry) -> str:
    return json.dumps(entry).encode().hex()


def _require_alike(found: dict[int, Entry]) -> None:
    """Raises unless all ranks came for the same purpose with the same version of gradsync."""
    by_rank = sorted(found.items())
    if len({entry.version for entry in found.values()}) > 1:
        versions = ", ".join(f"{entry.version} on rank {rank}" for rank, entry in by_rank)
        raise GroupError(f"the ranks have different versions of gradsync, install the same one everywhere: {versions}")
    require_one_purpose({rank: Came(0, entry.what, "") for rank, entry in by_rank})


def _node() -> str:
    """Returns the name of this rank's node: the host name and torchrun's group rank."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
