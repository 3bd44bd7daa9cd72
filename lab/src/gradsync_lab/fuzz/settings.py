"""Random schemes and compressors: every registered one, its settings drawn by their types or by a table."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from operator import ge, gt, le, lt
from random import Random
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval, Le, Lt

from gradsync.comm import LocalGroup
from gradsync.compressors import Compressor, ErrorFeedback
from gradsync.compressors.expressions import NAMES, Nameable, registered
from gradsync.costs.cluster import Placement
from gradsync.schemes import WITH_SUMS, Leaf, Scheme, words_of
from gradsync.schemes.base import Traits
from gradsync.schemes.points import OWNERS, SMALLEST
from gradsync.schemes.tree import compressions, is_flat
from gradsync.tensors.bucket import Bucket, Layout
from gradsync.tensors.index_formats import SPARSE_FORMATS, IndexFormat

TRIES = 20  # draws of a scheme's settings, most of which fit each other
FEEDBACK_SHARE = 0.6  # of compressors that schemes get, as what is lost can be accounted for with feedback only
MOST_DEPTH = 3  # schemes and compressors inside each other
INTS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 127, 255, 256, 1024)
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.9, 1.0)
FLOATS = (0.0, 1e-3, 0.1, 0.5, 0.9, 1.0, 2.0, 2.5)

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The place that a scheme is drawn for: a bucket, and ranks on nodes."""

    bucket: Bucket
    size: int
    ranks_per_node: int = 1

    @property
    def placement(self) -> Placement:
        return Placement.regular(self.size // self.ranks_per_node, self.ranks_per_node)

    @property
    def tables(self) -> int:
        return len(self.bucket.segments) if self.bucket.layout is Layout.ROWS else 0

    @property
    def counts(self) -> list[int]:
        """The numbers of rows of each table, or of elements, of which a capacity has room for a part."""
        if self.bucket.layout is Layout.ROWS:
            return [spec.num_rows for spec in self.bucket.tensors]
        return [self.bucket.numel] * 2


@cache
def families() -> Mapping[Any, Mapping[str, Any]]:
    """Returns all registered classes of both families by name, with those of other distributions, such as the lab."""
    for point in entry_points(group=NAMES):
        point.load()
    return {family: registered(family) for family in (Scheme, Compressor)}


def drawn_scheme(rng: Random, place: Place, *, mixes: bool = False) -> Scheme[Any]:
    """Returns a random scheme that the bucket and the ranks of `place` can have; `mixes`: one for parameters."""
    known = families()[Scheme]
    names = list(_MIXING if mixes else sorted(known.keys() - set(_MIXING)))
    rng.shuffle(names)
    for name in names:
        if _layout_of(known[name]) not in (None, place.bucket.layout):
            continue
        for _ in range(TRIES):
            try:
                scheme: Scheme[Any] = _made(known[name], rng, place, MOST_DEPTH)
                _check(scheme, place)
            except ValueError:  # settings that do not fit each other, the bucket, or the ranks
                continue
            return scheme
    raise RuntimeError(f"no drawn scheme fits {place}")


_MIXING = ("gossip", "shuffled")  # schemes for parameters only: no mean of all ranks


def _check(scheme: Scheme[Any], place: Place) -> None:
    """Raises ValueError where `attach` would refuse the scheme for this bucket and these ranks."""
    if scheme.traits.layout is not place.bucket.layout:
        raise ValueError("for buckets of another layout")
    bucket = Bucket("0", place.bucket.segments, place.bucket.tensors, place.bucket.layout, scheme.traits.carries_flags)
    scheme.check(bucket.specs)
    scheme.stages(place.size)
    scheme.init(bucket, LocalGroup.world(place.size, place.placement)[0])
    if bucket.layout is Layout.FLAT:
        scheme.steps(bucket.specs, (), place.placement)
    sizes = [getattr(scheme, name, ()) for name in ("capacity", "same_rows")]
    if place.tables and any(size and len(size) != place.tables for size in sizes):
        raise ValueError("for another number of tables")


def _made(named: Any, rng: Random, place: Place, depth: int) -> Any:
    hints = _hints(named)
    settings: dict[str, Any] = {}
    for field in fields(named):
        special = _SPECIAL.get((named.name, field.name)) or _SPECIAL.get(field.name)
        if special is not None:
            settings[field.name] = special(rng, place, settings)
        else:
            settings[field.name] = _value(hints[field.name], rng, place, depth)
    return named(**settings)


@cache
def _hints(named: Any) -> dict[str, Any]:
    return get_type_hints(named, include_extras=True)


@cache
def _layout_of(named: Any) -> Layout | None:
    """Returns the layout of buckets of all of a class's schemes; None: it depends on their settings."""
    traits = getattr(named, "traits", None)
    return traits.layout if isinstance(traits, Traits) else None


def _value(annotation: Any, rng: Random, place: Place, depth: int) -> Any:
    """Returns a random value of a setting's type.

    Raises:
        TypeError: for a type that no rule draws; such a setting needs a line in `_SPECIAL`.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _number(arguments[0], arguments[1:], rng)
    if origin is Literal:
        return rng.choice(arguments)
    if origin in (Union, types.UnionType):
        return _value(rng.choice(arguments), rng, place, depth)
    if origin is tuple:
        return tuple(_value(arguments[0], rng, place, depth) for _ in range(rng.randrange(3)))
    family = origin or annotation
    if family is bool:
        return rng.random() < 0.5
    if family is type(None):
        return None
    if family is int:
        return rng.choice(INTS)
    if isinstance(family, type) and issubclass(family, Enum):
        return rng.choice(list(family))
    if isinstance(family, type) and issubclass(family, Nameable):
        return _member(family, rng, place, depth - 1)
    raise TypeError(f"no rule draws a setting of the type {annotation}: give it a line in the fuzzer's settings")


def _member(family: Any, rng: Random, place: Place, depth: int) -> Any:
    """Returns a random member of a family, or of a class in it, as a setting of another scheme or compressor."""
    if depth < 0:
        raise ValueError("nested too deep")
    if family is Compressor and depth == MOST_DEPTH - 1 and rng.random() < FEEDBACK_SHARE:
        return ErrorFeedback(_member(Compressor, rng, place, depth - 1))
    known = families()[Scheme if issubclass(family, Scheme) else Compressor]
    return _made(known[rng.choice(_names(family))], rng, place, depth)


@cache
def _names(family: Any) -> tuple[str, ...]:
    known = families()[Scheme if issubclass(family, Scheme) else Compressor]
    return tuple(sorted(name for name, named in known.items() if issubclass(named, family) and name not in _MIXING))


def _number(kind: Any, bounds: Sequence[Any], rng: Random) -> int | float:
    known: Sequence[int | float] = INTS if kind is int else sorted({*SHARES, *FLOATS})
    fitting = [number for number in known if all(_is_inside(number, bound) for bound in bounds)]
    if kind not in (int, float) or not fitting:
        raise TypeError(f"no rule draws a {kind} within {bounds}: give the setting a line in the fuzzer's settings")
    return rng.choice(fitting)


def _is_inside(number: float, bound: Any) -> bool:
    if isinstance(bound, Interval):
        return all(_is_inside(number, each) for each in bound)
    for kind, limit, holds in ((Ge, "ge", ge), (Gt, "gt", gt), (Le, "le", le), (Lt, "lt", lt)):
        if isinstance(bound, kind):
            return bool(holds(number, getattr(bound, limit)))
    raise TypeError(f"a bound of an unknown kind: {bound!r}")


# Settings that their types do not tell enough of.

Drawn = Callable[[Random, Place, Mapping[str, Any]], Any]


def _seed(rng: Random, place: Place, made: Mapping[str, Any]) -> int:
    return rng.choice((0, 1, rng.getrandbits(31)))


def _capacity(rng: Random, place: Place, made: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns room for a share of the rows or elements, for none or for all; or nothing, where sizes are exchanged."""
    if rng.random() < 0.3:
        return ()
    return tuple(round(rng.choice((0.0, 0.1, 0.5, 1.0)) * count) for count in place.counts)


def _same_rows(rng: Random, place: Place, made: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns for each table itself, or the first one with as many rows, as if they had the same."""
    if not made.get("capacity"):
        return ()
    rows = place.counts
    return tuple(rows.index(count) if rng.random() < 0.5 else number for number, count in enumerate(rows))


def _summands(rng: Random, place: Place, made: Mapping[str, Any]) -> int:
    return rng.choice((place.size, place.size + 1, 16))


def _tasks(rng: Random, place: Place, made: Mapping[str, Any]) -> tuple[str, ...]:
    return words_of(rng.choice(_leaves(rng.random() < 0.5, place.ranks_per_node == 1)))


@cache
def _leaves(few: bool, flat: bool) -> tuple[Leaf, ...]:
    leaves = [leaf for leaf in WITH_SUMS.leaves() if is_flat(leaf) or not flat]
    return tuple(leaf for leaf in leaves if not few or compressions(leaf) <= 1)


def _of_route(rng: Random, place: Place, made: Mapping[str, Any]) -> Compressor[Any] | None:
    if not any(task.startswith("compress") for task in made["tasks"]):
        return None
    compressor: Compressor[Any] = _member(Compressor, rng, place, MOST_DEPTH - 1)
    return compressor


def _rounds(rng: Random, place: Place, made: Mapping[str, Any]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns up to three rounds, each with all ranks in groups."""
    rounds = []
    for _ in range(rng.randint(1, 3)):
        ranks = rng.sample(range(place.size), place.size)
        cuts = sorted(rng.sample(range(1, place.size), rng.randrange(place.size)))
        bounds = zip([0, *cuts], [*cuts, place.size], strict=True)
        rounds.append(tuple(sorted(tuple(sorted(ranks[low:high])) for low, high in bounds)))
    return tuple(rounds)


def _relaxations(rng: Random, place: Place, made: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    if rng.random() < 0.5:
        return ()
    return tuple(tuple(rng.choice((0.5, 0.75, 1.0)) for _ in groups) for groups in made["rounds"])


def _distances(rng: Random, place: Place, made: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    others = [distance for distance in range(-place.size, place.size + 1) if distance]
    return tuple(tuple(rng.sample(others, rng.randint(1, 2))) for _ in range(rng.randint(1, 2)))


def _warmup_compressors(rng: Random, place: Place, made: Mapping[str, Any]) -> tuple[Compressor[Any], ...]:
    """Returns two compressors of the same class, as their payloads must be alike."""
    known = families()[Compressor]
    named = known[rng.choice(sorted(known.keys() - {"warmup", "error_feedback", "momentum_correction"}))]
    return tuple(_made(named, rng, place, 0) for _ in range(2))


def _formats(rng: Random, place: Place, made: Mapping[str, Any]) -> str:
    known = SPARSE_FORMATS if place.bucket.layout is Layout.ROWS else tuple(IndexFormat)
    return rng.choice((SMALLEST, *map(str, known)))


_SPECIAL: dict[str | tuple[str, str], Drawn] = {
    "seed": _seed,
    "capacity": _capacity,
    "same_rows": _same_rows,
    "summands": _summands,
    "ranks": lambda rng, place, made: place.size,
    "ranks_per_node": lambda rng, place, made: rng.choice((1, place.ranks_per_node)),
    "nodes_per_rack": lambda rng, place, made: rng.choice((1, 1, 2)),
    "push_format": _formats,
    "pull_format": _formats,
    ("element_point", "owners"): lambda rng, place, made: rng.choice((None, *OWNERS[made["balance"]])),
    ("row_point", "owners"): lambda rng, place, made: rng.choice((None, *OWNERS[made["balance"]])),
    ("route", "tasks"): _tasks,
    ("route", "compressor"): _of_route,
    ("shuffled", "rounds"): _rounds,
    ("shuffled", "relaxations"): _relaxations,
    ("gossip", "distances"): _distances,
    ("thc", "chunk"): lambda rng, place, made: rng.choice((64, 256, 4096)),
    ("warmup", "compressors"): _warmup_compressors,
    ("warmup", "starts"): lambda rng, place, made: (0, rng.randint(1, 3)),
    ("majority_vote", "compressor"): lambda rng, place, made: _member(_sign(), rng, place, 1),
    ("coarse_grained", "steps_per_ratio"): lambda rng, place, made: rng.randint(1, 2) if made["warmup"] else 0,
    ("zen_hash", "expected"): lambda rng, place, made: rng.choice((0, 1, place.bucket.numel)),
}


def _sign() -> Any:
    return families()[Compressor]["sign"]
