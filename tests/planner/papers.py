"""The problems of the reference tables in the specifications of ByteComp and MergeComp."""

from __future__ import annotations

from gradsync.planner.problem import Curve, Demand, Option, Problem, Resource
from gradsync.simulator.models import paper_model

DENSE, DEVICE, HOST = range(3)
OFFLOADED = {DEVICE: HOST}
CASES = {"A": (8e-4, 0.27), "B": (3.2e-4, 0.62), "C": (8e-5, 0.27)}  # ms a KB between nodes, ms to encode

MS_PER_KB = 1e-6  # in seconds a byte, KB = 1000 bytes


def bytecomp_problem(model: str, case: str) -> Problem:
    """`bytecomp.md` 5.7: over 8 nodes 16-bit all-reduce, or a thirty-second encoded on device or host; no decoding."""
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
    """`mergecomp.md` 5.1: 1-bit payloads gathered over 8 nodes at 10 Gb/s, decoded after the last transfer."""
    chain = (
        Demand(Resource.COMPUTE, Curve.linear(130e-6, 4e-6 * MS_PER_KB)),
        Demand(Resource.INTER, Curve.linear(300e-6, 0.175e-3 * MS_PER_KB)),
        Demand(Resource.COMPUTE, Curve.linear(140e-6, 4.2e-6 * MS_PER_KB)),
    )
    return _problem(model, Option("signs", chain))


def _problem(model: str, *options: Option) -> Problem:
    found = paper_model(model)
    return Problem(found.gaps_s, found.nbytes, options)
