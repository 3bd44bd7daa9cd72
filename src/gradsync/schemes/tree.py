"""ByteComp's decision tree as data: all sequences of tasks that synchronise a bucket (Wang et al., EuroSys 2023).

A *leaf* is a sequence of tasks. Local tasks compress or decompress on one of the devices. Collectives exchange dense
data or payloads among all ranks (flat), or inside nodes, across nodes, and inside again (hierarchical). A collective of
two steps begins with one that leaves each rank, or one root, with a sum, and ends with one that hands the sums to all;
the first step determines the second. The rules of a `Grammar` say which tasks may follow each other: another device,
collective or rule changes data only.

`BYTECOMP` are the paper's eight tasks: 4341 leaves on two devices, 174 on one, 9 of them without compression.
`WITH_SUMS` adds a ninth, `CommL`, the all-reduce of payloads, for compressors whose payloads can be summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from types import MappingProxyType

from ..costs.steps import COMPUTE, OFFLOAD
from ..inputs.settings import NonNegativeInt, check

DEVICES = (COMPUTE, OFFLOAD)
"""The resources on which a task may compress or decompress: the core that trains, and the one beside it."""
COMPRESS, DECOMPRESS = "compress", "decompress"
ROOTED = ("reduce", "gather")  # first steps that leave everything with one member


class Kind(StrEnum):
    """The kinds of tasks by which a bucket is exchanged, named as by ByteComp (EuroSys 2023).

    Attributes:
        COMP: a compression.
        DECOMP: a decompression.
        COMM: a collective of dense tensors in one step.
        COMM_1, COMM_2: the first and second half of a two-step collective of dense tensors.
        COMM_C: a collective that sends compressed tensors.
        COMM_1C, COMM_2C: the first and second half of such a collective in two steps.
        COMM_L: a collective that sums compressed tensors; ByteComp has none.
    """

    COMP = "Comp"
    DECOMP = "Decomp"
    COMM = "Comm"
    COMM_1 = "Comm1"
    COMM_2 = "Comm2"
    COMM_C = "CommC"
    COMM_1C = "Comm1C"
    COMM_2C = "Comm2C"
    COMM_L = "CommL"

    @property
    def is_local(self) -> bool:
        """Whether the task is work of one rank alone."""
        return self in (Kind.COMP, Kind.DECOMP)

    @property
    def is_first(self) -> bool:
        """Whether the task is the first half of a two-step collective, as a reduce_scatter before an all_gather."""
        return self in (Kind.COMM_1, Kind.COMM_1C)

    @property
    def is_second(self) -> bool:
        """Whether the task is the second half of a two-step collective, as an all_gather after a reduce_scatter."""
        return self in (Kind.COMM_2, Kind.COMM_2C)

    @property
    def of_payloads(self) -> bool:
        """Whether the task is a collective that exchanges compressed tensors (payloads), not dense data."""
        return self in (Kind.COMM_C, Kind.COMM_1C, Kind.COMM_2C, Kind.COMM_L)


class Scope(StrEnum):
    """The ranks among which a collective runs.

    Attributes:
        ALL: all ranks.
        NODE: the ranks of a node.
        ACROSS: the ranks that have the same place on all nodes.
    """

    ALL = "all"
    NODE = "node"
    ACROSS = "across"


@dataclass(frozen=True)
class RouteTask:
    """A task in the sequence by which a bucket is summed (route): coding on a device, or a collective.

    Coding is compression or decompression.

    Attributes:
        kind: the kind of task.
        choice: the device of a coding task, or the collective.
        scope: the ranks among which a collective runs; None for a coding task.
        first: for the second half of a two-step collective: its first half, such as "reduce_scatter"; "" for other
            tasks.
    """

    kind: Kind
    choice: str
    scope: Scope | None = None
    first: str = ""

    @property
    def rooted(self) -> bool:
        """Whether the task is a reduce or gather to one rank of each group, or the broadcast that follows it."""
        return (self.first or self.choice) in ROOTED

    @property
    def word(self) -> str:
        """The task's name in plans, such as `compress@offload` or `all_to_all`."""
        match self.kind:
            case Kind.COMP:
                return f"{COMPRESS}@{self.choice}"
            case Kind.DECOMP:
                return f"{DECOMPRESS}@{self.choice}"
        return self.choice


Leaf = tuple[RouteTask, ...]
"""A complete way through ByteComp's decision tree: the tasks by which a bucket is summed, in their order."""


@dataclass(frozen=True)
class LeafConstraints:
    """Limits that users set on the sequences of tasks (leaves of ByteComp's decision tree) that a plan may use.

    Attributes:
        most_compressions: the most compressions in a sequence; None: any number.
        without: names of collectives and devices that are not used.
        flat_only: whether only collectives among all ranks are used.
    """

    most_compressions: NonNegativeInt | None = None
    without: tuple[str, ...] = ()
    flat_only: bool = False

    def __post_init__(self) -> None:
        check(self)

    def admits(self, leaf: Leaf) -> bool:
        """Whether the constraints allow this sequence of tasks."""
        most = self.most_compressions
        return (
            (most is None or compressions(leaf) <= most)
            and not any(task.choice in self.without for task in leaf)
            and not (self.flat_only and not is_flat(leaf))
        )

    def each(self) -> list[LeafConstraints]:
        """Returns one object for each constraint that is set, with that constraint alone."""
        found = [] if self.most_compressions is None else [LeafConstraints(most_compressions=self.most_compressions)]
        found += [LeafConstraints(without=(name,)) for name in self.without]
        return found + ([LeafConstraints(flat_only=True)] if self.flat_only else [])

    def __str__(self) -> str:
        parts = [] if self.most_compressions is None else [f"most_compressions={self.most_compressions}"]
        parts += [f"without {name}" for name in self.without]
        return " and ".join(parts + (["flat_only"] if self.flat_only else [])) or "no constraint"


@dataclass(frozen=True)
class _Point:
    """A state of a derivation in a `Grammar`, after some tasks of a leaf."""

    todo: tuple[str, ...]  # symbols still to be derived
    opened: tuple[str, ...] = ()  # first steps whose second steps are still to come


@dataclass(frozen=True)
class Grammar:
    """A context-free grammar whose sentences are leaves: sequences of tasks by which ranks sum a bucket.

    Attributes:
        rules: the alternatives of each symbol: symbols and kinds of tasks, separated by blanks.
        collectives: the collectives of each kind, except second halves.
        seconds: the second half that belongs to each first half of a collective in two steps.
        start: the symbol of a whole leaf.
    """

    rules: Mapping[str, tuple[str, ...]]
    collectives: Mapping[Kind, tuple[str, ...]]
    seconds: Mapping[str, str]
    start: str = "tree"

    @cached_property
    def _alternatives(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        return {symbol: tuple(tuple(text.split()) for text in texts) for symbol, texts in self.rules.items()}

    def leaves(self, devices: Sequence[str] = DEVICES, constraints: LeafConstraints | None = None) -> tuple[Leaf, ...]:
        """Returns all leaves (sequences of tasks by which ranks sum a bucket) that the constraints allow, each once.

        Args:
            devices: the devices on which compressions and decompressions may run.
            constraints: limits on the leaves; None: no limits.

        Raises:
            ValueError: if constraints name unknown collectives or devices, or exclude all leaves; the message names the
                constraints that conflict.
        """
        found = tuple(map(_scoped, self._derived(_Point((self.start,)), tuple(devices), {})))
        if constraints is None:
            return found
        self.check_names(constraints, devices)
        left = tuple(leaf for leaf in found if constraints.admits(leaf))
        if not left:
            raise ValueError(
                f"no leaf of {len(found)} is left under {_conflict(found, constraints)}: loosen one of them"
            )
        return left

    def count(self, symbol: str | None = None, devices: int = len(DEVICES)) -> int:
        """Returns how many leaves (sequences of tasks) the grammar has if compressions may run on `devices` devices.

        `symbol`: counts the expansions of this symbol of the grammar instead; None: those of the start symbol.
        """
        symbol = self.start if symbol is None else symbol
        if symbol not in self.rules:
            kind = Kind(symbol)
            return devices if kind.is_local else 1 if kind.is_second else len(self.collectives[kind])
        total = 0
        for alternative in self._alternatives[symbol]:
            ways = 1
            for part in alternative:
                ways *= self.count(part, devices)
            total += ways
        return total

    def parse(self, words: Sequence[str], devices: Sequence[str] = DEVICES) -> Leaf:
        """Returns the tasks that have these names, in order, as they stand in a plan: the inverse of `words_of`.

        `devices`: the devices that names may have, as in "compress@offload".

        Raises:
            ValueError: for names that make no complete leaf; the message has the first illegal one, if any, and legal
                ones.
        """
        paths: list[tuple[Leaf, _Point]] = [((), _Point((self.start,)))]
        for number, word in enumerate(words):
            ahead = [
                ((*done, task), after) for done, point in paths for task, after in self._next(point, tuple(devices))
            ]
            paths = [(done, point) for done, point in ahead if done[-1].word == word]
            if not paths:
                legal = sorted({done[-1].word for done, _ in ahead})
                known = ", ".join(legal) if legal else "the end"
                after = f"after {', '.join(words[:number])}" if number else "at the beginning"
                raise ValueError(f"{word!r} may not come {after}; expected {known}")
        ended = [done for done, point in paths if not point.todo]
        if not ended:
            legal = sorted({task.word for _, point in paths for task, _ in self._next(point, tuple(devices))})
            raise ValueError(f"the tasks {', '.join(words) or '()'} end too early: expected {', '.join(legal)}")
        (leaf,) = ended
        return _scoped(leaf)

    def _derived(self, point: _Point, devices: tuple[str, ...], known: dict[_Point, list[Leaf]]) -> list[Leaf]:
        """Returns all sequences of tasks that complete the derivation `point`; `known` caches results by point."""
        if not point.todo:
            return [()]
        if point not in known:
            known[point] = [
                (task, *rest)
                for task, after in self._next(point, devices)
                for rest in self._derived(after, devices, known)
            ]
        return known[point]

    def _next(self, point: _Point, devices: tuple[str, ...]) -> Iterator[tuple[RouteTask, _Point]]:
        """Yields each task that may come next in a derivation, with the derivation after it."""
        if not point.todo:
            return
        symbol, *others = point.todo
        if symbol in self._alternatives:
            for alternative in self._alternatives[symbol]:
                yield from self._next(_Point((*alternative, *others), point.opened), devices)
            return
        kind, rest = Kind(symbol), tuple(others)
        if kind.is_local:
            yield from ((RouteTask(kind, device), _Point(rest, point.opened)) for device in devices)
        elif kind.is_second:
            *outer, first = point.opened
            yield RouteTask(kind, self.seconds[first], first=first), _Point(rest, tuple(outer))
        else:
            for collective in self.collectives[kind]:
                opened = (*point.opened, collective) if kind.is_first else point.opened
                yield RouteTask(kind, collective), _Point(rest, opened)

    def check_names(self, constraints: LeafConstraints, devices: Collection[str] = DEVICES) -> None:
        """Checks that the collectives and devices which constraints exclude (`without`) exist.

        Raises:
            ValueError: for unknown names.
        """
        there_are = [*devices, *dict.fromkeys(name for names in self.collectives.values() for name in names)]
        there_are += [name for name in dict.fromkeys(self.seconds.values()) if name not in there_are]
        for name in constraints.without:
            if name not in there_are:
                raise ValueError(f"LeafConstraints.without names {name!r}; expected some of {', '.join(there_are)}")


def compressions(leaf: Leaf) -> int:
    """Returns how many tasks of the leaf (sequence of tasks by which a bucket is exchanged) compress."""
    return sum(task.kind is Kind.COMP for task in leaf)


def is_flat(leaf: Leaf) -> bool:
    """Whether all collectives of the leaf (sequence of tasks) are among all ranks, none inside or across nodes."""
    return all(task.scope in (None, Scope.ALL) for task in leaf)


def is_local(stage: str) -> bool:
    """Whether a task of this name compresses or decompresses on one rank, and is no collective."""
    return stage.partition("@")[0] in (COMPRESS, DECOMPRESS)


def words_of(leaf: Leaf) -> tuple[str, ...]:
    """Returns the names of a leaf's tasks, in their order."""
    return tuple(task.word for task in leaf)


def _scoped(leaf: Leaf) -> Leaf:
    """Returns the leaf with a scope for each collective.

    Of three or more collectives the first and the last run inside nodes, the others across; else all run among all.
    """
    moves = [place for place, task in enumerate(leaf) if not task.kind.is_local]
    scopes: dict[int, Scope] = dict.fromkeys(moves, Scope.ALL)
    if len(moves) > 2:
        scopes = {place: Scope.NODE if place in (moves[0], moves[-1]) else Scope.ACROSS for place in moves}
    return tuple(_with_scope(task, scopes.get(place)) for place, task in enumerate(leaf))


@cache
def _with_scope(task: RouteTask, scope: Scope | None) -> RouteTask:
    return replace(task, scope=scope)


def _conflict(leaves: Sequence[Leaf], constraints: LeafConstraints) -> str:
    """Returns, in words, constraints that together exclude all leaves, and of which none can be left out."""
    needed = constraints.each()
    for each in list(needed):
        others = [other for other in needed if other is not each]
        if not any(all(other.admits(leaf) for other in others) for leaf in leaves):
            needed = others
    return " and ".join(map(str, needed))


_RULES = {
    "tree": ("flat", "hier"),
    "flat": ("Comm", "Comm1 T1", "Comp CommC Decomp", "Comp Comm1C T2"),
    "hier": (
        "Comm1 T3",
        "Comm1 Comp T4",
        "Comp Comm1C Decomp T3",
        "Comp Comm1C Decomp Comp T4",
        "Comp Comm1C T4",
    ),
    "T1": ("Comm2", "Comp Comm2C Decomp"),  # the last step, of dense data
    "T2": ("Comm2C Decomp", "Decomp T1"),  # the last step, of payloads
    "T3": ("Comm T1", "Comm1 T5"),  # across and then inside nodes, of dense data
    "T4": ("CommC T2", "Comm1C Comm2C T2", "Comm1C Decomp T5"),  # the same, of payloads
    "T5": ("Comm2 T1", "Comp Comm2C T2"),  # the second step across, then inside, of dense data
}
_COLLECTIVES = {
    Kind.COMM: ("all_reduce",),
    Kind.COMM_1: ("reduce_scatter", "reduce"),
    Kind.COMM_C: ("all_gather",),
    Kind.COMM_1C: ("all_to_all", "gather"),
}
_SECONDS = {
    "reduce_scatter": "all_gather",
    "all_to_all": "all_gather",
    "reduce": "broadcast",
    "gather": "broadcast",
}
BYTECOMP = Grammar(MappingProxyType(_RULES), MappingProxyType(_COLLECTIVES), MappingProxyType(_SECONDS))
"""ByteComp's decision tree (Wang et al., EuroSys 2023) as a grammar."""
WITH_SUMS = replace(
    BYTECOMP,
    rules=MappingProxyType(
        {**_RULES, "flat": (*_RULES["flat"], "Comp CommL Decomp"), "T4": (*_RULES["T4"], "CommL T2")}
    ),
    collectives=MappingProxyType({**_COLLECTIVES, Kind.COMM_L: ("all_reduce",)}),
)
"""The same tree with all-reduces of compressed tensors that can be summed."""
