"""`drawn`: the case of a seed."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from gradsync.compressors.expressions import to_expression
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec, trainable_parameters

from .case import BucketCase, Case, Part, Spot
from .case import Segment as Range
from .models import FuzzModel
from .settings import Place, drawn_scheme

PROCESS_SHARE = 0.125  # of cases, which take ten times as long as those in threads
DTYPES = ("float32",) * 5 + ("float64", "bfloat16", "float16")
KINDS = ("mlp",) * 3 + ("table",) * 3 + ("bag", "tied", "conv", "scalar", "empty")


def drawn(seed: int) -> Case:
    """Returns the random case of a seed: the same on every machine, as long as the families and the rules are."""
    rng = Random(seed)
    world = "processes" if rng.random() < PROCESS_SHARE else "threads"
    size = rng.choice((1, 2, 2, 2, 3, 3, 4, 4, 5))
    mixes = world == "threads" and rng.random() < 0.06
    parts = tuple(_part(rng, number, first=number == 0) for number in range(rng.randint(1, 4)))
    settings: dict[str, Any] = {
        "seed": seed,
        "world": world,
        "size": size,
        "ranks_per_node": rng.choice([n for n in range(1, size + 1) if size % n == 0]),
        "parts": parts,
        "steps": rng.randint(1, 4),
        "ready": rng.getrandbits(16),
        "order": rng.choice((0, rng.getrandbits(16))),
        "magnitude": rng.choice((1.0, 1.0, 100.0, 1e-3)),
        "optimizer": rng.choice(("sgd", "sgd", "momentum", "adam")),
    }
    if any(part.sparse for part in parts):  # which Adam refuses
        settings["optimizer"] = "sgd"
    settings |= {"what": "parameter"} if mixes else _training(rng, settings)
    if world == "processes":
        settings |= _frontend(rng, settings)
    case = Case(**settings)
    if world == "processes" and rng.random() < 0.15:
        return case
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(FuzzModel(case)).items()}
    buckets = _buckets(rng, case, specs)
    once = "momentum" in repr(buckets) or "signum" in repr(buckets)  # which optimisers with momentum refuse
    return case.model_copy(update={"buckets": buckets, **({"optimizer": "sgd"} if once else {})})


def _part(rng: Random, number: int, *, first: bool) -> Part:
    kind = rng.choice(KINDS if not first else KINDS[:7])
    later = rng.choice((None,) * 9 + (1,))
    frozen = rng.choice(("none",) * 8 + ("first", "all"))
    used = rng.choice(("always",) * 5 + ("on some ranks", "in some steps", "at times", "never"))
    sparse = kind in ("table", "bag", "tied") and rng.random() < 0.7
    dtype = rng.choice(DTYPES)
    if sparse and dtype == "float16":  # which torch cannot accumulate
        dtype = "bfloat16"
    settings: dict[str, Any] = dict(
        key=f"{kind}{number}",
        kind=kind,
        width=rng.choice((1, 2, 3, 4, 7, 16)),
        rows=rng.choice((1, 2, 8, 30, 100)),
        depth=rng.choice((1, 1, 2, 3)),
        dtype=dtype,
        sparse=sparse,
        shared=rng.random() < 0.2,
        memory=rng.choice(("plain", "plain", "strided")),
        frozen="none" if first else frozen,
        frozen_from=None if first else later,
        used="always" if first else used,
        hook=rng.choice(("none",) * 6 + ("new", "in place")) if kind in ("mlp", "conv", "scalar") else "none",
    )
    return Part(**settings)


def _training(rng: Random, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how gradients are accumulated, and which fault the job has."""
    size, steps = settings["size"], settings["steps"]
    found: dict[str, Any] = {
        "micro": rng.choice((1, 1, 2, 3)),
        "zero": rng.choice(("none", "none", "zero", "never")),
        "clip": rng.random() < 0.2,
        "verify_every": rng.choice((1, 1, 2, 0)),
    }
    event = rng.random()
    if event < 0.08:
        found |= {"spoilt": Spot(step=rng.randrange(steps), rank=rng.randrange(size)), "zero": "none"}
    elif event < 0.14 and size > 1:
        found |= {"written": Spot(step=1, rank=rng.randrange(size)), "steps": 5, "verify_every": 1}
    elif event < 0.26 and steps > 1 and not any(part.frozen_from for part in settings["parts"]):
        found |= {"reload_at": rng.randrange(1, steps)}
    return found


def _frontend(rng: Random, settings: Mapping[str, Any]) -> dict[str, Any]:
    sparse = any(part.sparse for part in settings["parts"])  # which DDP on gloo sums with a race, see semantics.md
    beside = not sparse and "written" not in settings and rng.random() < 0.5
    found: dict[str, Any] = {"frontend": rng.choice(("attach", "attach", "ddp_hook", "class")), "ddp": beside}
    if found["frontend"] == "ddp_hook":
        found["parts"] = tuple(map(_for_reducer, settings["parts"]))
    return found


def _for_reducer(part: Part) -> Part:
    """Returns the part as DDP's Reducer takes it: a sparse gradient must be there on each rank, and stay sparse."""
    if part.kind == "tied":
        return part.model_copy(update={"sparse": False})
    return part.model_copy(update={"used": "always", "frozen_from": None}) if part.sparse else part


def _buckets(rng: Random, case: Case, specs: Mapping[str, TensorSpec]) -> tuple[BucketCase, ...]:
    """Returns buckets that cover all parameters, some of them cut, in any order and with any schemes."""
    found = []
    for dtype in dict.fromkeys(spec.dtype for spec in specs.values()):
        names = [name for name, spec in specs.items() if spec.dtype is dtype]
        ranges = [part for name in names for part in _ranges(rng, name, specs[name].numel)]
        rng.shuffle(ranges)
        while ranges:
            count = rng.randint(1, len(ranges))
            segments, ranges = tuple(ranges[:count]), ranges[count:]
            found.append(_bucket(rng, case, segments, specs))
    rng.shuffle(found)
    return tuple(found)


def _ranges(rng: Random, name: str, numel: int) -> list[Range]:
    if numel < 2 or rng.random() < 0.7:
        return [(name, 0, numel)]
    cuts = sorted(rng.sample(range(1, numel), min(rng.randint(1, 2), numel - 1)))
    return [(name, low, high) for low, high in zip([0, *cuts], [*cuts, numel], strict=True)]


def _bucket(rng: Random, case: Case, segments: tuple[Range, ...], specs: Mapping[str, TensorSpec]) -> BucketCase:
    whole = all(stop - start == specs[name].numel and specs[name].shape for name, start, stop in segments)
    mixes = case.what == "parameter"
    rows = whole and not mixes and rng.random() < 0.5
    tensors = tuple(specs[name] for name, _, _ in segments)
    bucket = Bucket("0", tuple(Segment(*each) for each in segments), tensors, Layout.ROWS if rows else Layout.FLAT)
    scheme = drawn_scheme(rng, Place(bucket, case.size, case.ranks_per_node), mixes=mixes)
    return BucketCase(segments=segments, scheme=to_expression(scheme))
