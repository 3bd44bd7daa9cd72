"""The problems of the reference tables in the specifications of ByteComp and MergeComp."""

from __future__ import annotations

from gradsync.simulator.reference import CASES, DENSE, DEVICE, HOST, OFFLOADED, bytecomp_problem, mergecomp_problem

__all__ = ["CASES", "DENSE", "DEVICE", "HOST", "OFFLOADED", "bytecomp_problem", "mergecomp_problem"]
