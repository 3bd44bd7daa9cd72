"""Small problems with known results of every search: reference tables for ByteComp and MergeComp, by other code.

The stated figures are our own, computed by other code before this library existed; the papers print no such tables.
ResNet101's are for the authors' trace, which is not included: here its gaps are modelled (`models`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsync.planner.solver.joint import certify, search
from gradsync.planner.solver.machine import deferred_s, step_s
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, layerwise

from ..rivals.cuts import best_cuts, curve
from ..rivals.greedy import bytecomp_device, bytecomp_offload
from ..rivals.merge import DDP_BYTES, equal_counts, fixed_size, mergecomp, released_cut, two_buckets
from .models import paper_model
from .tables import Rows, Table

DENSE, DEVICE, HOST = range(3)
OFFLOADED = {DEVICE: HOST}
CASES = {"A": (8e-4, 0.27), "B": (3.2e-4, 0.62), "C": (8e-5, 0.27)}  # ms a KB between nodes, ms to encode
MODELS = ("vgg16", "lstm", "bert-base", "gpt2", "resnet101")

MS_PER_KB = 1e-6  # in seconds a byte, KB = 1000 bytes

SEARCHES = ("none", "all on device", "Algorithm 1", "device only", "Algorithms 1, 2", "joint, uncut")
STATED_SEARCHES = {  # ms, by search
    "vgg16 A": (397.00, 97.56, 89.46, 89.46, 89.46, 88.92),
    "vgg16 B": (164.56, 113.05, 93.21, 93.21, 93.21, 93.21),
    "vgg16 C": (85.61, 97.56, 85.61, 85.61, 85.61, 85.61),
    "lstm A": (278.56, 84.60, 82.96, 82.96, 82.67, 82.67),
    "lstm B": (None, None, 80.26, 80.26, 80.26, 80.26),
    "lstm C": (None, None, 74.52, 74.52, 74.52, 74.52),
    "bert-base A": (364.61, 124.51, 89.41, 89.41, 87.87, 80.50),
    "bert-base B": (181.67, 192.33, 92.16, 92.02, 92.16, 78.41),
    "bert-base C": (90.46, 120.82, 72.81, 72.81, 72.81, 70.07),
    "gpt2 A": (395.21, 258.63, 222.18, 222.18, 221.12, 219.21),
    "gpt2 B": (255.72, 307.63, 216.49, 216.49, 216.49, 216.49),
    "gpt2 C": (221.75, 252.55, 212.86, 212.86, 212.86, 212.86),
    "resnet101 A": (218.94, 205.47, 133.14, 133.14, 131.87, 120.71),
    "resnet101 B": (144.10, 315.37, 128.45, 128.45, 128.45, 120.70),
    "resnet101 C": (120.69, None, 120.69, 120.69, 120.69, 120.69),
}

CUTS = ("1 bucket", "2", "3", "best", "layer-wise", "25 MiB", "2 by count")
STATED_CUTS = {  # ms, by cuts; then the numbers of buckets of the best cuts and of 25 MiB
    "vgg16": ((187.3, 105.4, 101.5, 101.2, 113.4, 102.4, 123.4), 4, 5),
    "lstm": ((135.0, 122.7, 119.5, 119.5, 121.9, 120.2, 122.7), 3, 5),
    "bert-base": ((146.3, 114.9, 104.4, 91.5, 166.2, 92.9, 116.8), 13, 13),
    "gpt2": ((302.4, 255.2, 246.7, 243.4, 282.0, 247.8, 272.9), 5, 13),
    "resnet101": ((153.6, 123.3, 123.0, 123.0, 206.9, 126.3, 131.2), 3, 7),
}

WAYS = ("25 MiB, 16-bit", "best cuts, 16-bit", "options, uncut", "cuts, 16-bit or device", "cuts and all options")
STATED_WAYS = {  # ms, in cases A, B, C, by way
    "vgg16": ((389.46, 388.37, 88.92, 89.30, 88.92), (157.02, 155.93, 93.21, 93.21, 93.21), (85.77, *(85.61,) * 4)),
    "lstm": (
        (277.45, 276.55, 82.67, 82.96, 82.67),
        (145.82, 145.50, 80.26, 80.26, 80.26),
        (88.75, 88.44, 74.52, 74.52, 74.52),
    ),
    "bert-base": (
        (314.16, 307.37, 80.50, 73.26, 71.98),
        (131.21, 125.63, 78.41, 71.69, 69.88),
        (73.38, 72.76, 70.07, 67.36, 67.36),
    ),
    "gpt2": (
        (369.37, 356.11, 219.21, 219.42, 219.10),
        (260.48, 254.82, 216.49, 216.49, 216.49),
        (221.97, 221.75, 212.86, 212.86, 212.86),
    ),
    "resnet101": (
        (130.84, 126.59, 120.71, 120.99, 120.71),
        (124.30, *(120.70,) * 4),
        (121.59, *(120.69,) * 4),
    ),
}


def bytecomp_problem(model: str, case: str) -> Problem:
    """Returns a model's planning problem on 8 nodes, with three options: 16 bits, encoded on device, encoded on host.

    `case`, a key of `CASES`, sets link rate and encoding time. Payloads have a thirty-second of the bytes. There is no
    decoding, and one channel.
    """
    beta, encode_ms = CASES[case]
    dense = Curve.linear(0.3e-3, 2 * (7 / 8) * beta / 2 * MS_PER_KB)
    compressed = Demand(Resource.INTER, Curve.linear(0.3e-3, 2 * (7 / 8) * beta / 32 * MS_PER_KB))
    knee = 8 * 4194304.0
    on_device = Curve.knee(encode_ms * 1e-3, encode_ms * 1e-3 / knee, knee)
    return _problem(
        model,
        Option("dense", (Demand(Resource.INTER, dense),)),
        Option("device", (Demand(Resource.COMPUTE, on_device), compressed)),
        Option("host", (Demand(Resource.OFFLOAD, Curve.linear(0.0, 4e-4 * MS_PER_KB)), compressed)),
    )


def mergecomp_problem(model: str) -> Problem:
    """Returns the planning problem of a model whose 1-bit payloads are gathered over 8 nodes at 10 Gb/s.

    Costs are linear. It is meant for `deferred_s`, in which decoding waits for the last transfer.
    """
    chain = (
        Demand(Resource.COMPUTE, Curve.linear(130e-6, 4e-6 * MS_PER_KB)),
        Demand(Resource.INTER, Curve.linear(300e-6, 0.175e-3 * MS_PER_KB)),
        Demand(Resource.COMPUTE, Curve.linear(140e-6, 4.2e-6 * MS_PER_KB)),
    )
    return _problem(model, Option("signs", chain))


def _problem(model: str, *options: Option) -> Problem:
    found = paper_model(model)
    return Problem(found.gaps_s, found.nbytes, options)


def only(problem: Problem, *options: int) -> Problem:
    """Returns the problem limited to the exchange options with these numbers."""
    return replace(problem, allowed=(frozenset(options),) * problem.size)


_OF_NOTES = "In brackets: worked out by other code."
_TRACE = "ResNet101 is stated for the authors' trace, here its gaps are modelled: some per mille apart."


def searches_table(models: Sequence[str] = MODELS) -> Table:
    """Tabulates step times by fixed options, ByteComp's algorithms and gradsync's search, with each tensor a bucket.

    gradsync's search is shown also with tensors merged into buckets, with the largest possible gap to the best.
    """
    rows = Rows("searches", "ms")
    for model in models:
        for case in CASES:
            name, problem = f"{model} {case}", bytecomp_problem(model, case)
            first = bytecomp_device(problem)
            found = (
                step_s(problem, layerwise(problem, DENSE)),
                step_s(problem, layerwise(problem, DEVICE)),
                first.seconds,
                search(only(problem, DENSE, DEVICE), max_items=1).seconds,
                bytecomp_offload(problem, first.parts, OFFLOADED).seconds,
                search(problem, max_items=1).seconds,
            )
            rows.add(name, ((c, 1e3 * s, p) for c, s, p in zip(SEARCHES, found, STATED_SEARCHES[name], strict=True)))
            certificate = certify(problem, search(problem))
            rows.add(name, [("with cuts", 1e3 * certificate.seconds, None)])
            rows.add(name, [("gap at most", 100 * certificate.gap, None)], "%")
    return rows.done(
        "Backward and synchronisation, ms, by search; three options a tensor, one channel",
        "A, B, C: 10, 25, 100 Gb/s, 0.27, 0.62, 0.27 ms to encode. The gap is of the plan with cuts.",
        f"{_OF_NOTES} Device only and joint are exact there; here gradsync's search finds them.",
        _TRACE,
    )


def cuts_table(models: Sequence[str] = MODELS) -> Table:
    """Tabulates step times by how compressed gradients are cut into buckets, the question of MergeComp."""
    rows = Rows("cuts", "ms")
    for model in models:
        problem = mergecomp_problem(model)
        stated, best_count, ddp_count = STATED_CUTS[model]
        best, ddp = best_cuts(problem).parts, fixed_size(problem)
        by_count = [solution.parts for solution in curve(problem, most=3)]
        found = (*by_count, best, layerwise(problem, 0), ddp, equal_counts(problem))
        rows.add(model, ((c, 1e3 * deferred_s(problem, p), s) for c, p, s in zip(CUTS, found, stated, strict=True)))
        rows.add(model, [("best has", len(best), best_count), ("25 MiB has", len(ddp), ddp_count)], "buckets")
    return rows.done(
        "Backward and synchronisation, ms, all compressed to signs, by cuts into buckets",
        f"{_OF_NOTES} Linear costs: 8 nodes, 10 Gb/s, decoding after the last transfer.",
        _TRACE,
        decimals=1,
    )


def ways_table(models: Sequence[str] = MODELS) -> Table:
    """Tabulates step times where buckets, exchange options, or both together are searched for."""
    rows = Rows("cuts and options", "ms")
    for model in models:
        for case, stated in zip(CASES, STATED_WAYS[model], strict=True):
            problem = bytecomp_problem(model, case)
            solution = search(problem)
            found = (
                step_s(problem, fixed_size(problem, DENSE, DDP_BYTES)),
                best_cuts(problem, DENSE).seconds,
                search(problem, max_items=1).seconds,
                search(only(problem, DENSE, DEVICE)).seconds,
                solution.seconds,
            )
            name = f"{model} {case}"
            rows.add(name, ((c, 1e3 * s, p) for c, s, p in zip(WAYS, found, stated, strict=True)))
            rows.add(name, [("gap at most", 100 * certify(problem, solution).gap, None)], "%")
    return rows.done(
        "Backward and synchronisation, ms, by what is searched together; options and cases as in ByteComp's tables",
        f"{_OF_NOTES} Exact there; here found by gradsync's search, with the largest possible gap to the best.",
        _TRACE,
    )


COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 24, 32)  # numbers of buckets that a curve shows


def curves_table(models: Sequence[str] = MODELS) -> Table:
    """Tabulates F(y), the step time with the best cuts into y buckets, and that of layer-wise compression."""
    rows = Rows("F(y)", "ms")
    for model in models:
        problem = mergecomp_problem(model)
        found = {len(s.parts): 1e3 * deferred_s(problem, s.parts) for s in curve(problem, most=max(COUNTS))}
        rows.add(model, ((str(count), found[count], None) for count in COUNTS if count in found))
        rows.add(model, [("layer-wise", 1e3 * deferred_s(problem, layerwise(problem, 0)), None)])
    return rows.done(
        "F(y): backward and synchronisation, ms, of the best cuts into y buckets",
        "Exact, in the linear model of the table of cuts; nobody published such curves.",
        decimals=1,
    )


def released_table(models: Sequence[str] = MODELS) -> Table:
    """Tabulates step times by the binary search that MergeComp's authors released, and by the best cuts."""
    rows = Rows("released search", "ms")
    for model in models:
        problem = mergecomp_problem(model)
        probed: list[int] = []

        def seconds(cut: int, problem: Problem = problem, probed: list[int] = probed) -> float:
            probed.append(cut)
            return deferred_s(problem, (Part(0, cut, 0), Part(cut, problem.size, 0)))

        cut = released_cut(problem.size, seconds)
        found_s, best_s = seconds(cut), deferred_s(problem, best_cuts(problem).parts)
        values = [
            ("released", found_s),
            ("best 2", deferred_s(problem, two_buckets(problem).parts)),
            ("as published, to 4", deferred_s(problem, mergecomp(problem).parts)),
            ("best", best_s),
        ]
        rows.add(model, ((column, 1e3 * value, None) for column, value in values))
        rows.add(model, [("loses", 100 * (found_s / best_s - 1), None)], "%")
        rows.add(model, [("probes", len(set(probed)), None)], "of 20 steps")
    return rows.done(
        "MergeComp's released binary search for two buckets, on exact times, against exact cuts",
        "Probes: different cuts that it measures, 20 iterations each, after 100 of warm-up; gradsync's needs none.",
        decimals=1,
    )
