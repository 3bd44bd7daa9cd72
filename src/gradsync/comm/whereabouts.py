"""`Whereabouts`: says which members of a group failed, left, went elsewhere, or are lost, by what the store holds.

All members issue the same operations in the same order, so the number of issued operations shows who is behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

from .board import Board, Failure, purpose, require_one_purpose
from .errors import GroupError, ranks_in_words
from .rendezvous import WARNING_S
from .roll_call import Progress, RollCall
from .store import ANSWER_S, NO_STORE, StoreClient, patience

logger = logging.getLogger(__name__)

LAST_S = 0.5  # for the store to tell what the others know, before and after a call of the roll
POLL_S = (0.002, 0.2)  # pauses of a rank at a barrier between two looks for the others: the first and the longest


class Whereabouts:
    """A member's view of its group: which members failed, left or do not answer, by what they wrote into the store.

    Args:
        store: this member's connection to the store.
        name: the prefix of the group's keys in the store: the same on all members, used by nothing else.
        members: the global ranks.
        own: the global rank of this process.
        timeout_s: seconds that members wait for each other.
        around: if this group is a subgroup, the `Whereabouts` of the group around it.

    Attributes:
        issued: the number of operations that this member has issued.
    """

    def __init__(
        self,
        store: StoreClient,
        name: str,
        members: tuple[int, ...],
        own: int,
        timeout_s: float,
        around: Whereabouts | None = None,
    ) -> None:
        self.name, self.issued = name, 0
        self._members, self._own, self._timeout_s, self._around = members, own, timeout_s, around
        self._within: list[Whereabouts] = []
        self._barriers = 0  # the number of barriers that this member has come to
        self._board = Board(store, name)
        if around is not None:
            around._within.append(self)
        self._roll_call: RollCall = around._roll_call if around else RollCall(store, name, own, self.progress)

    def progress(self) -> Progress:
        """Returns the number of operations issued so far, of this group and its subgroups, by the group's name."""
        found = {self.name: self.issued}
        for each in list(self._within):
            found.update(each.progress())
        return found

    def announce_failure(self, text: str, ranks: Collection[int] | None = None) -> None:
        """Makes the other members raise an error with this text when they next wait; it goes through the store.

        `ranks`: the global ranks that are the cause; None: this rank.
        """
        failure = Failure(
            self._own, tuple([self._own] if ranks is None else ranks), text, tuple(self._roll_call.silent)
        )
        with patience(ANSWER_S):
            is_told = self._board.announce_failure(failure)
        if not is_told:
            logger.warning("could not tell the other ranks of a failure here, the store does not answer: %s", text)

    def leave(self) -> None:
        """Tells the other members, through the store, that this one closes the group."""
        self._board.note_left(self._own, self.issued)
        if self._around is not None and self in self._around._within:
            self._around._within.remove(self)

    def all_left(self) -> bool:
        """Whether all members have closed the group, or are lost, so that its keys in the store can be deleted."""
        try:
            failure, left = self._failure(), self._board.left()
        except GroupError:  # they cannot be read: not this group's to delete
            return False
        return left.keys() | self._roll_call.silent | set(failure.lost if failure else ()) >= set(self._members)

    def close(self, *, clear: bool) -> None:
        """Ends the thread that answers roll calls, unless this is a subgroup; `clear`: deletes keys from the store."""
        if clear:
            self._board.clear(self._barriers)
        if self._around is None:
            self._roll_call.close(clear=clear)

    def meet(self, what: str, timeout_s: float, *, detail: str) -> None:
        """Blocks until all members have called this for the same purpose, through the store, without a collective.

        Args:
            what: the purpose, the same on all members.
            timeout_s: seconds to wait for the other members.
            detail: details of this member, for error messages.

        Raises:
            GroupError: where a member came for another purpose, has left, has failed, or does not come in time.
        """
        barrier, pause_s, warned, text = self._barriers, POLL_S[0], False, purpose(what, detail)
        self._note_arrival(what, detail)
        began_s = answered_s = time.monotonic()
        while missing := sorted(set(self._members) - (here := self._board.arrivals(barrier)).keys()):
            if self._own in missing:  # the store did not take the note while it owed an answer
                self._board.note_arrival(barrier, self._own, self.issued, what, detail)
            gone = self._board.left_before(self.issued)
            if failure := self._failure():  # read last, as in `told`
                raise failure.error()
            if gone:
                raise GroupError(f"{ranks_in_words(gone)} detached before {text}, which all ranks must come to", gone)
            now_s = time.monotonic()
            answered_s = now_s if here else answered_s  # at least one member is there
            if now_s - answered_s >= min(WARNING_S, timeout_s):
                raise GroupError(f"{NO_STORE}; the ranks meet there for {text}")
            if now_s - began_s >= timeout_s:
                others = self._roll_call.answers(self._members).keys() - {self._own}  # so that all know who is lost
                raise (None if others else self._stood_still()) or GroupError(
                    f"{ranks_in_words(missing)} did not come to {text} within {timeout_s:.0f} s: all ranks must",
                    missing,
                )
            if not warned and now_s - began_s >= WARNING_S:
                logger.warning(
                    "waiting for %.0f s by now for %s to come to %s", WARNING_S, ranks_in_words(missing), text
                )
                warned = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
        require_one_purpose(here)

    def _note_arrival(self, what: str, detail: str) -> None:
        """Writes this member's arrival at a barrier to the store, for members of this group and of its subgroups."""
        barrier, self._barriers = self._barriers, self._barriers + 1
        self._board.note_arrival(barrier, self._own, self.issued, what, detail)
        for each in self._within:
            each._note_arrival(what, detail)

    def told(self, number: int, within_s: float = ANSWER_S) -> GroupError | None:
        """Returns why operation `number` of the group cannot end, by what members wrote into the store, or None.

        A member may have failed, closed the group, or be at a barrier instead; None: nothing there says so. `within_s`:
        seconds to wait for each of these answers of the store.
        """
        with patience(within_s):
            gone = self._board.left_before(number)
        with patience(within_s):
            failure = self._failure()  # read last: who leaves because of a failure has announced it before
        with patience(within_s):
            came = {} if failure or gone else self._board.arrivals(self._barriers)
        if failure:
            return failure.error()
        if gone:
            return GroupError(
                f"{ranks_in_words(gone)} detached before this; in training every rank must make the same number of "
                "steps (DistributedSampler(drop_last=True) does)",
                gone,
            )
        elsewhere = {rank: each for rank, each in came.items() if each.operations <= number}
        if elsewhere:
            what = next(iter(elsewhere.values()))
            return GroupError(
                f"{what} began on {ranks_in_words(sorted(elsewhere))} while others train: all ranks must come to it, "
                "between the same two steps",
                elsewhere,
            )
        return None

    def _failure(self) -> Failure | None:
        """Returns the failure that a member of this group or one around it announced; None if there is none.

        A failed rank outside a subgroup can keep the subgroup's members waiting too.
        """
        whole = self._around._failure() if self._around is not None else None
        return whole or self._board.failure()

    def why_broken(self, number: int, why: str) -> GroupError:
        """Returns the error of operation `number`, which failed in the backend, and names the ranks that are the cause.

        They are the ranks that said so in the store, else those that a roll call misses. `why`: the backend's own
        error.
        """
        if told := self.told(number, within_s=LAST_S):
            return told
        missing = self.who_is_missing(number)
        # The others may have found out meanwhile, or have left because of it.
        return self.told(number, within_s=LAST_S) or GroupError(f"{missing} ({why})", missing.ranks)

    def who_is_missing(self, number: int) -> GroupError:
        """Asks all ranks how far they are; returns an error that names the members that are lost or behind.

        `number`: the operation that this member waits for, counted as all members issue the same ones in the same
        order.
        """
        answers = self._roll_call.answers(self._members)
        if self._own not in answers:
            return self._stood_still() or GroupError(NO_STORE)
        came = {rank: issued.get(self.name, 0) for rank, issued in answers.items()} | self._board.left()
        silent = [rank for rank in self._members if rank not in came]
        if alone := self._left_alone(silent):
            return alone
        if silent:
            words = "does not answer: it has died, was stopped, or is blocked"
            if len(silent) > 1:
                words = "do not answer: they have died, were stopped, or are blocked"
            return GroupError(f"{ranks_in_words(silent)} {words}", silent)
        behind = [rank for rank, issued in sorted(came.items()) if issued <= number]
        if behind:
            return GroupError(
                f"{ranks_in_words(behind)} did not come this far: still at work, or a loop of fewer steps there", behind
            )
        return GroupError("every rank waits, so a connection between two of them is stuck")

    def _left_alone(self, absent: Sequence[int]) -> GroupError | None:
        """Returns the error of a rank from which all others are `absent` because they have left it, else None."""
        if len(absent) < len(self._members) - 1:
            return None
        if stood_still := self._stood_still():
            return stood_still
        if len(self._members) == 2:  # the other one is lost
            return None
        return GroupError("no other rank answers: they have ended, or have gone on without this rank")

    def _stood_still(self) -> GroupError | None:
        """Returns the error of a rank for which the others may have waited in vain, as it stood still; else None."""
        seconds = self._roll_call.stood_still_s(self._timeout_s)
        if not seconds:
            return None
        return GroupError(
            f"rank {self._own}, this one, stood still for {seconds:.0f} s (stopped or blocked), and the "
            "others may have gone on without it",
            [self._own],
        )
