"""Native (C++) kernels that sum tensors into count sketches, and estimate the elements from sketches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.cpu.boundary import plain, threads_for
from gradsync.kernels.draws import check_median, check_sketch
from gradsync.kernels.native import load


def count_sketch(x: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, *, rows: int) -> None:
    # Uses at most one thread for each row of counters.
    check_sketch(sections, columns, rows)
    table = _table(sections, columns)
    threads = threads_for(x.numel())
    load().count_sketch(plain("x", x), *table, rows, plain("counters", counters), threads)


def sketch_estimates(counters: Tensor, sections: Sections, columns: Sequence[int], out: Tensor, *, rows: int) -> None:
    check_sketch(sections, columns, rows)
    check_median(rows)
    table = _table(sections, columns)
    threads = threads_for(out.numel())
    load().sketch_estimates(plain("counters", counters), *table, rows, plain("out", out), threads)


def _table(sections: Sections, columns: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns four lists over sections: lengths, first indices in their tensors, seeds, counters in a sketch row."""
    return list(sections.lengths), list(sections.places), list(sections.seeds), list(columns)
