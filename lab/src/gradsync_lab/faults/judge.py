"""The judge: tells by the events of a case what became of each survivor, and whether the fault was handled well.

A survivor ends well if it goes on, or if it raises a clear error in time. The time counts from the fault, or from the
call that raised, if that began later: a link may become slow long before a message is late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from .cases import GRACE_S, IN_A_STEP, MUST_GO_ON, RAISES, Case, Fault, Phase

Event = dict[str, Any]

TEXT_CHARACTERS = 600  # of an error, kept in records
NAMES_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*(?:,? and \d+)?)")
NAMES_STEP, NAMES_BUCKET = re.compile(r"\bstep (\d+)\b"), re.compile(r"\bbucket '")
STUCK = ("gradsync store", "gradsync roll call")  # threads that wait for a store whose host has stopped
WORDS = {Phase.ATTACH: "attach", Phase.LOAD: "load", Phase.DETACH: "detach", "consensus": "consensus"}
# Faults that tell of themselves, or by which no rank is missing: nobody is asked to name the victim.
NAMELESS = (*MUST_GO_ON, Fault.UNLIKE, Fault.LINK_RATE, Fault.LINK_LOSS)


class Ending(StrEnum):
    """The ways in which a rank can end, from best to worst.

    `DDPS` is not clear either: a collective of DDP's own failed, under its hook, as it does in plain DDP.
    """

    WENT_ON = "went on"
    CLEAR = "clear error"
    GAVE_UP = "error without need"
    DDPS = "DDP's own error"
    UNCLEAR = "unclear error"
    LATE = "late error"
    HUNG = "hung"
    DIED = "died"


GOOD = (Ending.WENT_ON, Ending.CLEAR)
WORST_FIRST = tuple(reversed(Ending))


class RankVerdict(BaseModel):
    """The verdict on one survivor.

    Attributes:
        after_s: seconds from the fault, or the later start of the call, to the error; None without an error.
        where: the phase in which it raised.
        names_victim: None where there is no error, or nobody to name.
        blames: innocent ranks that the text takes for the cause.
        says_where: whether the text names bucket and step, or the phase outside of a step; None without an error.
        again: whether this rank could start again; None if it was not to.
        left: threads of Python, kernel tasks and descriptors that are left over at the end; None if there was none.
    """

    model_config = ConfigDict(extra="forbid")

    rank: int
    ending: Ending
    after_s: float | None = None
    error: str = ""
    text: str = ""
    where: str = ""
    names_victim: bool | None = None
    blames: list[int] = []
    says_where: bool | None = None
    again: bool | None = None
    again_text: str = ""
    left: tuple[list[str], int, int] | None = None
    stacks: str = ""


class Verdict(BaseModel):
    """The verdict on a case: whether the fault struck, and the verdicts on the ranks.

    Attributes:
        alike: whether all ranks that went on have the same parameters.
        not_possible: the reason why this machine could not bring the fault about; "" where it could.
    """

    model_config = ConfigDict(extra="forbid")

    struck: bool
    ranks: list[RankVerdict] = []
    alike: bool = True
    not_possible: str = ""

    @property
    def ending(self) -> Ending:
        """The worst ending of a survivor."""
        endings = [each.ending for each in self.ranks]
        return next((ending for ending in WORST_FIRST if ending in endings), Ending.WENT_ON)

    @property
    def again(self) -> bool:
        """Whether all ranks that were to start again did."""
        return all(each.again is not False for each in self.ranks)

    @property
    def threads_left(self) -> list[str]:
        """The names of threads that ranks kept which were to start again; a rank that is cut off may wait for ever."""
        kept = [each.left[0] for each in self.ranks if each.left is not None and each.again is not None]
        return sorted({name for names in kept for name in names})

    @property
    def good(self) -> bool:
        """Whether all survivors ended well, with the same parameters, could start again, and left no thread."""
        return self.ending in GOOD and self.alike and self.again and not self.threads_left


def judge(case: Case, events: Sequence[Event]) -> Verdict:
    """Returns the verdict on a case by its events, which are in order of time."""
    struck = next((event["t"] for event in events if event["what"] == "fault"), None)
    if struck is None:
        return Verdict(struck=False)
    ranks = [_verdict(case, rank, struck, events) for rank in range(case.size)]
    survivors = set(case.survivors)
    digests = {
        event["digest"] for event in events if event["what"] == "trained" and event["rank"] in survivors
    }  # of those that went on to the end
    judged = [each for each in ranks if each.rank in survivors or each.again is not None or each.left is not None]
    return Verdict(struck=True, ranks=judged, alike=len(digests) <= 1)


def _verdict(case: Case, rank: int, struck: float, events: Sequence[Event]) -> RankVerdict:
    mine = {event["what"]: event for event in events if event["rank"] == rank}
    hung = next((event for event in events if event["what"] == "hung" and event["of"] == rank), None)
    error, again, end = mine.get("error"), mine.get("again"), mine.get("end")
    found = RankVerdict(rank=rank, ending=_ending(case, rank, struck, mine, is_hung=hung is not None))
    if error is not None:
        found.error, found.text, found.where = error["type"], error["text"][:TEXT_CHARACTERS], error["where"]
        found.after_s = _after_s(error, struck)
        if rank in case.survivors and case.fault is not Fault.UNLIKE:
            found.says_where = says_where(error["where"], error["step"], error["text"])
        if rank != case.victim and case.fault not in NAMELESS:
            found.names_victim, found.blames = named(error["text"], case.victim, rank)
    if rank in case.again and _could_start(case, rank, mine, is_hung=hung is not None):
        found.again = again is not None and again["ok"]
        found.again_text = "" if again is None or again["ok"] else again["text"][:TEXT_CHARACTERS]
    if end is not None:
        before, after = end["before"], end["after"]
        kept = STUCK if case.victim == 0 and case.store_on_rank_0 else ()
        threads = [name for name in after["threads"] if name not in (*before["threads"], *kept)]
        found.left = threads, *(after[each] - before[each] for each in ("tasks", "descriptors"))
    if hung is not None:
        found.stacks = hung["stacks"]
    return found


def _could_start(case: Case, rank: int, mine: dict[str, Event], *, is_hung: bool) -> bool:
    """Whether the rank came to where it starts again, or should have: it was not lost for another reason before."""
    return "error" in mine or "trained" in mine or (rank in case.survivors and not is_hung)


def _ending(case: Case, rank: int, struck: float, mine: dict[str, Event], *, is_hung: bool) -> Ending:
    error = mine.get("error")
    if error is None:
        if "detached" in mine:
            return Ending.WENT_ON
        return Ending.HUNG if is_hung else Ending.DIED
    if rank not in case.survivors:  # a victim that lives: its own error is expected
        return Ending.CLEAR
    if _after_s(error, struck) > case.timeout_s + GRACE_S:
        return Ending.LATE
    if not _is_clear(case, error):
        return Ending.DDPS if error["ddps"] else Ending.UNCLEAR
    return Ending.GAVE_UP if case.fault in MUST_GO_ON else Ending.CLEAR


def _after_s(error: Event, struck: float) -> float:
    return float(error["t"] - max(struck, error["began"]))


def _is_clear(case: Case, error: Event) -> bool:
    """Whether gradsync raised the error, as it says: a `GroupError`, or in attach what a rank said of its own."""
    if error["ours"]:
        return True
    in_attach = _attaches(error["where"], error["step"]) and error["type"] in (
        "RuntimeError",
        "ValueError",
        "TypeError",
    )
    if case.fault is Fault.UNLIKE:
        return in_attach
    return case.fault in RAISES and in_attach and f"rank {case.victim} could not attach" in error["text"]


def _attaches(where: str, step: int) -> bool:
    """Whether a rank may be attaching there: DDP's hook attaches in the first backward."""
    return where == Phase.ATTACH or (where == Phase.BACKWARD and step <= 0)


def clauses(text: str) -> Iterator[set[int]]:
    """Yields the ranks of each mention in a text: {3} for `rank 3`, {0, 2} for `ranks 0, 2`."""
    for match in NAMES_RANKS.finditer(text):
        yield {int(number) for number in re.findall(r"\d+", match[1])}


def named(text: str, victim: int, reader: int) -> tuple[bool, list[int]]:
    """Returns whether an error's text names the victim, and the innocent ranks that it takes for the cause.

    Ranks that pass a failure on name themselves before it (`rank 0: ... rank 2 did not come`): they are no culprits
    where a later mention has the victim. Without one, they are, and so are ranks in one list with the victim.

    Args:
        reader: the rank that raised, which is no culprit in its own eyes.
    """
    mentions = list(clauses(text))
    has_victim = any(victim in ranks for ranks in mentions)
    culprits: set[int] = set()
    for ranks in mentions:
        if victim in ranks or not has_victim:
            culprits |= ranks - {victim, reader}
    return has_victim, sorted(culprits)


def says_where(where: str, step: int, text: str) -> bool:
    """Whether an error's text says where it happened: bucket and the right step, or the phase outside of a step.

    Averages of parameters land in the forward of the step after theirs.
    """
    steps = [int(number) for number in NAMES_STEP.findall(text)]
    if _attaches(where, step) and WORDS[Phase.ATTACH] in text.lower():
        return True
    if where in IN_A_STEP:
        right = {step, step - 1} if where == Phase.FORWARD else {step}
        return bool(NAMES_BUCKET.search(text)) and not right.isdisjoint(steps)
    return WORDS.get(where, where) in text.lower()
