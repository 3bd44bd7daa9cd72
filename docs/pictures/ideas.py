"""Draws the pictures of `docs/concepts/ideas.md` from schemes, kernels, schedules and the planner's timelines.

python docs/pictures/ideas.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from gradsync import kernels
from gradsync.comm import LocalGroup, drive, run_local
from gradsync.comm.shuffle import grid
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Pattern, Transfer
from gradsync.planner.solver.machine import play, step_s
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, layerwise
from gradsync.schemes import (
    BYTECOMP,
    DOUBLING_OF_ROWS,
    PARAMETER_SERVER_OF_ROWS,
    AGSparse,
    BalancedParallelism,
    CoarseGrained,
    Scheme,
    is_flat,
    words_of,
)
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec
from gradsync.tensors.density import DensityProfile, profile_rows
from gradsync.tensors.index_formats import IndexFormat
from gradsync_lab.papers.ds_sync import ring_seconds
from gradsync_lab.papers.reference import mergecomp_problem
from gradsync_lab.report.drawing import BLUE, GREEN, INK, MARGIN, ORANGE, PALE, PURPLE, RED, WIDTH, Drawing
from gradsync_lab.rivals.cuts import curve
from gradsync_lab.rivals.merge import lazy, whole

FOLDER = Path(__file__).parents[1] / "concepts" / "pictures"
SEED = 5
PICTURES: dict[str, Callable[[], Drawing]] = {}
LINKS = {"compute": "backward", "inter": "link"}


def picture(draw: Callable[[], Drawing]) -> Callable[[], Drawing]:
    PICTURES[draw.__name__.replace("_", "-")] = draw
    return draw


def skewed_rows(ranks: int, rows: int, touched: int, skew: float) -> list[Tensor]:
    """Returns for each rank the rows, 1-D int64, that a step touches: about `touched`, the first ones most often."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -skew
    low, high = 0.0, float(rows) ** (1 + skew)
    for _ in range(60):  # the factor that makes as many rows likely
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle * weights).clamp(max=1).sum()) < touched else (low, middle)
    generator = torch.Generator().manual_seed(SEED)
    drawn = (torch.rand(rows, generator=generator, dtype=torch.float64) for _ in range(ranks))
    return [(each < low * weights).nonzero().squeeze(1) for each in drawn]


def through_links(transfers: Iterable[Transfer], ranks: int) -> list[float]:
    """Returns the bytes that each rank sends or receives, whichever are more, over these transfers."""
    sent, received = [0.0] * ranks, [0.0] * ranks
    for transfer in transfers:
        for rank, nbytes in enumerate(transfer.part_bytes):
            times, others = nbytes * (ranks - 1), sum(transfer.part_bytes) - nbytes
            if transfer.pattern is Pattern.ALL_TO_ALL:  # the bytes that each member gets from each other one
                sent[rank], received[rank] = sent[rank] + others, received[rank] + times
            elif transfer.pattern is Pattern.ALL_GATHER:
                sent[rank], received[rank] = sent[rank] + times, received[rank] + others
        for source, to, nbytes in transfer.messages:
            sent[source], received[to] = sent[source] + nbytes, received[to] + nbytes
    return [max(pair) for pair in zip(sent, received, strict=True)]


def transfers_of(scheme: Scheme, table: TensorSpec, profile: DensityProfile, ranks: int) -> list[Transfer]:
    steps = scheme.steps((table,), (profile,), Placement.one_per_node(ranks))
    return [step for step in steps if isinstance(step, Transfer)]


@picture
def zen_balance() -> Drawing:
    """The bytes of each rank by parameter servers and by Balanced Parallelism, from their steps."""
    ranks, table = 8, TensorSpec((4096, 32), torch.float32)
    profile = profile_rows(skewed_rows(ranks, 4096, 400, 0.8), 4096)
    sheet = Drawing("Bytes through each rank's link: sparse parameter servers and Balanced Parallelism")
    sheet.note("kB through each rank's link; 8 ranks, a table of 4096 rows")
    sheet.note("of which a step touches a tenth, the first ones most often")
    schemes = {
        "rows to owners of rows (parameter servers)": PARAMETER_SERVER_OF_ROWS,
        "rows to owners of columns (Balanced Parallelism)": BalancedParallelism(),
    }
    loads = {words: transfers_of(scheme, table, profile, ranks) for words, scheme in schemes.items()}
    stages = {BLUE: "push", ORANGE: "pull"}
    bars = {
        words: {c: through_links([t for t in found if t.stage == stage], ranks) for c, stage in stages.items()}
        for words, found in loads.items()
    }
    most = max(value for each in bars.values() for values in each.values() for value in values)
    for words, series in bars.items():
        sheet.heading(words)
        sheet.bars([f"rank {rank}" for rank in range(ranks)], series, most)
        busiest = max(sum(values) for values in zip(*series.values(), strict=True))
        sheet.note(f"the busiest rank: {busiest / 1e3:.0f} kB; all wait for it")
    sheet.legend({"push: rows to their owners": BLUE, "pull: sums back to all": ORANGE})
    return sheet


@picture
def zen_crossover() -> Drawing:
    """The bytes of schemes for sparse tables by density, from their steps."""
    ranks, rows = 16, 16384
    table = TensorSpec((rows, 32), torch.float32)
    dense = 2 * (ranks - 1) / ranks * table.nbytes
    schemes = {RED: AGSparse(), ORANGE: DOUBLING_OF_ROWS, PURPLE: PARAMETER_SERVER_OF_ROWS, BLUE: BalancedParallelism()}
    lines: dict[str, list[tuple[float, float]]] = {colour: [] for colour in schemes}
    for density in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7):
        profile = profile_rows(skewed_rows(ranks, rows, round(density * rows), 0.7), rows)
        for colour, scheme in schemes.items():
            found = sum(each.busiest_bytes for each in transfers_of(scheme, table, profile, ranks))
            lines[colour].append((density, found / dense))
    sheet = Drawing("Bytes of the busiest rank by density, over those of a dense all-reduce")
    sheet.note("bytes of the busiest rank over those of a dense all-reduce, 16 ranks;")
    sheet.note("across: share of the table's rows that one rank touches")
    up, across = (0.02, 0.1, 1, 10), (0.002, 0.01, 0.1, 0.7)
    names = ("0.2 %", "1 %", "10 %", "70 %"), ("0.02", "0.1", "1", "10")
    sheet.curves({INK: [(0.002, 1), (0.7, 1)], **lines}, across, up, names)
    sheet.legend({
        "dense all-reduce": INK, "AGsparse (all to all)": RED, "recursive doubling": ORANGE,
        "parameter servers": PURPLE, "Balanced Parallelism": BLUE,
    })  # fmt: skip
    return sheet


@picture
def zen_hashing() -> Drawing:
    """The non-zero elements of each owner, by contiguous parts, hierarchical hashing and the rotated stripe."""
    owners, numel = 8, 1 << 16
    indices = skewed_rows(1, numel, 4000, 0.9)[0]
    part = numel // owners
    hashed = kernels.hierarchical_hash(indices, owners, slots=2 * len(indices), serial=len(indices) // 5, seed=SEED)
    gradient = torch.zeros(numel)
    gradient[indices] = 1.0
    striped = kernels.partition_elements(gradient, owners, SEED)
    ways = {
        "contiguous parts": torch.bincount(indices // part, minlength=owners).tolist(),
        "hierarchical hashing (Zen)": [len(each) for each in hashed.owned],
        "rotated stripe (gradsync)": list(striped.counts),
    }
    sheet = Drawing("Non-zero elements of each of 8 owners by three owner maps")
    sheet.note("non-zero elements of each of 8 owners; about 4000 of 65536 elements,")
    sheet.note("the first ones of the tensor most often")
    most = max(max(counts) for counts in ways.values())
    for (words, counts), colour in zip(ways.items(), (RED, BLUE, GREEN), strict=True):
        sheet.heading(words)
        sheet.bars([str(count) for count in counts], {colour: counts}, most, height=60)
        sheet.note(f"the busiest owner has {max(counts) * owners / sum(counts):.2f} times the mean")
    return sheet


@picture
def zen_bitmap() -> Drawing:
    """The bytes of indices in the pull of sums: lists, bitmaps over the whole tensor, bitmaps over owned elements."""
    ranks, numel = 16, 1 << 20
    part = numel // ranks
    shares = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    lines = {
        RED: [(d, ranks * IndexFormat.LIST.nbytes(round(d * part), numel)) for d in shares],
        ORANGE: [(d, ranks * IndexFormat.BITMAP.nbytes(round(d * part), numel)) for d in shares],
        BLUE: [(d, ranks * IndexFormat.BITMAP.nbytes(round(d * part), part)) for d in shares],
        GREEN: [(d, ranks * min(f.nbytes(round(d * part), part) for f in IndexFormat if f != "dense")) for d in shares],
    }
    sheet = Drawing("Bytes of the indices of all owners' sums, by index format and density")
    sheet.note("bytes of the indices of all 16 owners' sums, a tensor of 1 M elements;")
    sheet.note("across: share of the sum's elements that are not zero")
    up, across = (1e3, 1e4, 1e5, 1e6, 3e6), (0.0005, 0.005, 0.05, 0.5)
    sheet.curves(lines, across, up, (("0.05 %", "0.5 %", "5 %", "50 %"), ("1 kB", "10 kB", "100 kB", "1 MB", "3 MB")))
    sheet.legend({
        "list of indices": RED, "bitmap over the whole tensor": ORANGE, "bitmap over owned elements (Zen)": BLUE,
        "the smallest of four formats (gradsync)": GREEN,
    })  # fmt: skip
    return sheet


@picture
def ds_sync_shuffle() -> Drawing:
    """The groups of three rounds of 8 ranks, and how far rank 0's parameters have spread after each."""
    schedule = grid((2, 2, 2))
    sheet = Drawing("Three rounds of groups of two among 8 ranks, and where rank 0's parameters have come")
    sheet.note("ranks joined by an arc average their parameters in that round;")
    sheet.note("blue: the share of rank 0's parameters in a rank's average")
    wide = (WIDTH - 2 * MARGIN) / 8
    for number in range(len(schedule.rounds) + 1):
        top = sheet.y + 34
        shares = schedule.product(0, number)[:, 0] if number else [1.0] + [0.0] * 7
        words = f"after {number} round{'s' if number != 1 else ''}" if number else "before"
        sheet.text(MARGIN, sheet.y + 10, words, size=11, bold=True)
        for rank in range(8):
            x = MARGIN + (rank + 0.5) * wide
            sheet.circle(x, top, 13, BLUE, opacity=float(shares[rank]))
            share = float(shares[rank])
            sheet.text(
                x, top + 4, f"1/{round(1 / share)}" if 0 < share < 1 else str(round(share)), size=10, anchor="middle"
            )
        if number < len(schedule.rounds):
            for group in schedule.rounds[number].groups:
                first, last = (MARGIN + (rank + 0.5) * wide for rank in (group[0], group[-1]))
                deep = top + 18 + 3 * (group[-1] - group[0]) + (group[0] % (group[-1] - group[0])) * 3
                sheet.line([(first, top + 14), (first, deep), (last, deep), (last, top + 14)], ORANGE, width=2)
        sheet.y = top + 48
    sheet.y -= 26
    return sheet


@picture
def ds_sync_wait() -> Drawing:
    """The seconds of one averaging round, a rank's link being slow: all ranks in one ring, and groups of four."""
    rate, size = 1.25e9, 16
    slow = 5
    sheet = Drawing("Milliseconds of a round for each of 16 ranks, one of which has a slow link")
    sheet.note("ms until each of 16 ranks has its average of 100 MB at 10 Gbit/s;")
    sheet.note(f"the link of rank {slow} is four times slower")
    rates = [rate / 4 if rank == slow else rate for rank in range(size)]
    rounds = {
        "all ranks together": [tuple(range(size))],
        "groups of four (DS-Sync), which change in the next round": grid((4, 4)).rounds[0].groups,
    }
    took = {
        words: {
            rank: 1e3 * ring_seconds(len(group), min(rates[r] for r in group)) for group in groups for rank in group
        }
        for words, groups in rounds.items()
    }
    most = max(max(seconds.values()) for seconds in took.values())
    for words, seconds in took.items():
        sheet.heading(words)
        in_order = [seconds[rank] for rank in range(size)]
        sheet.bars([str(rank) for rank in range(size)], {BLUE: in_order}, most, height=70)
        sheet.note(f"mean {sum(in_order) / size:.0f} ms, slowest {max(in_order):.0f} ms")
    return sheet


def link(call_s: float, mb_s: float) -> Demand:
    """Returns a transfer between nodes that takes `call_s` and `mb_s` for every MB."""
    return Demand(Resource.INTER, Curve.linear(call_s, mb_s / 1e6))


def timelines(sheet: Drawing, problem: Problem, plans: dict[str, Sequence[Part]], streams: dict[str, str]) -> None:
    """Draws the timeline of each plan below its words, all at one scale."""
    seconds = max(step_s(problem, parts) for parts in plans.values())
    for words, parts in plans.items():
        sheet.heading(f"{words}: {1e3 * step_s(problem, parts):.0f} ms")
        sheet.timeline(play(problem, parts), streams, seconds)


@picture
def gradientflow_lazy() -> Drawing:
    """Timelines of many small gradients, each sent by itself, all together, and lazily merged."""
    sizes = tuple(1e6 * mb for mb in (0.4, 0.3, 0.5, 0.3, 0.6, 0.4, 0.3, 0.5, 0.4, 0.6, 0.3, 0.4, 0.5, 0.3))
    problem = Problem((4e-3,) * len(sizes), sizes, (Option("all-reduce", (link(6e-3, 4e-3),)),))
    sheet = Drawing("Timelines of a step: gradients sent one by one, all at the end, and lazily merged")
    sheet.note("14 gradients of 0.3 to 0.6 MB; each transfer takes 6 ms before its")
    sheet.note("first byte; a colour is a bucket, the dashed line the end of the step")
    plans = {
        "each gradient by itself": layerwise(problem, 0),
        "all in one bucket": whole(problem),
        "lazy all-reduce": lazy(problem),
    }
    timelines(sheet, problem, plans, LINKS)
    return sheet


@picture
def gradientflow_chunks() -> Drawing:
    """The chunks that two ranks send in eight steps, by the scheme itself."""
    chunks, size, steps = 24, 64, 8
    scheme = CoarseGrained(ratio=0.25, chunk=size)
    bucket = Bucket(
        "0", (Segment("w", 0, chunks * size),), (TensorSpec((chunks * size,), torch.float32),), Layout.FLAT, True
    )
    magnitudes = torch.linspace(2, 0.2, chunks).repeat_interleave(size)

    def train(group: LocalGroup) -> list[tuple[list[bool], list[float]]]:
        generator = torch.Generator().manual_seed(SEED + group.rank)
        state, seen = scheme.init(bucket, group), []
        for _ in range(steps):
            gradient = magnitudes * (2 * torch.rand(chunks * size, generator=generator) - 1)
            result, state = drive(scheme.synchronize(gradient, state, group, 0.5), timeout_s=60)
            (kept,) = state["sent"]
            waiting = kept.elements["residual"].view(chunks, size).norm(dim=1)
            seen.append(((result.view(chunks, size).norm(dim=1) > 0).tolist(), waiting.tolist()))
        return seen

    seen = run_local(2, train)[0]
    most = max(max(waiting) for _, waiting in seen)
    sheet = Drawing("Chunks of a gradient that travel in eight steps, and those that wait")
    sheet.note("24 chunks of a gradient, whose magnitudes fall from left to right;")
    sheet.note("a quarter travels in each step; the rest waits, grey by its norm")
    wide = (WIDTH - MARGIN - 60) / chunks
    for step, (sent, waiting) in enumerate(seen):
        sheet.text(MARGIN, sheet.y + 13, f"step {step}", size=11)
        for chunk in range(chunks):
            x = 60 + chunk * wide
            if sent[chunk]:
                sheet.rectangle(x, sheet.y, wide - 1.5, 16, BLUE)
            else:
                sheet.rectangle(x, sheet.y, wide - 1.5, 16, INK, opacity=0.08 + 0.7 * waiting[chunk] / most)
        sheet.y += 20
    sheet.y += 4
    sheet.legend({"sent: all ranks send the same chunks": BLUE, "kept for later": "#999999"})
    return sheet


@picture
def bytecomp_tree() -> Drawing:
    """The part of the decision tree without stages inside nodes, from the grammar: one row a task."""
    leaves = [words_of(leaf) for leaf in BYTECOMP.leaves(devices=("compute",)) if is_flat(leaf)]
    plain = [tuple(word.partition("@")[0].replace("_", " ") for word in leaf) for leaf in leaves]
    sheet = Drawing("ByteComp's decision tree for one bucket, without stages inside nodes")
    sheet.note(f"each way down is a leaf: one way to exchange a bucket; {len(leaves)} here,")
    sheet.note(f"{BYTECOMP.count():,} with nodes of several ranks and two devices")
    colours = {"compress": ORANGE, "decompress": ORANGE}
    shown: set[tuple[str, ...]] = set()
    for leaf in sorted(plain):
        for depth, word in enumerate(leaf):
            if leaf[: depth + 1] in shown:
                continue
            shown.add(leaf[: depth + 1])
            x = MARGIN + 6 + 24 * depth
            if depth:
                sheet.line([(x - 16, sheet.y - 2), (x - 16, sheet.y + 9), (x - 4, sheet.y + 9)], PALE, width=2)
            sheet.rectangle(x, sheet.y + 4, 10, 10, colours.get(word, BLUE))
            end = leaf[: depth + 1] in plain
            sheet.text(x + 16, sheet.y + 13, word + (" - leaf" if end else ""), size=11, bold=end)
            sheet.y += 18
    sheet.y += 6
    sheet.legend({"a collective": BLUE, "coding, on backward's core or another": ORANGE})
    return sheet


@picture
def bytecomp_timeline() -> Drawing:
    """Timelines of six gradients: none compressed, all on backward's core, and each as is best for the step."""
    gaps, sizes = (5e-3, 5e-3, 6e-3, 6e-3, 8e-3, 4e-3), tuple(1e6 * mb for mb in (2, 4, 2, 8, 6, 1))
    send, encode = link(1e-3, 0.2e-3), Curve.linear(1.5e-3, 0.6e-3 / 1e6)
    problem = Problem(gaps, sizes, (
        Option("dense", (link(1e-3, 3e-3),)),
        Option("on backward's core", (Demand(Resource.COMPUTE, encode), send)),
        Option("on another core", (Demand(Resource.OFFLOAD, Curve.linear(2.5e-3, 1.2e-3 / 1e6)), send)),
    ))  # fmt: skip
    plans = (tuple(Part(i, i + 1, option) for i, option in enumerate(each)) for each in product(range(3), repeat=6))
    best = min(plans, key=lambda parts: (round(step_s(problem, parts), 9), [part.option for part in parts]))
    sheet = Drawing("Timelines of six gradients by three choices of compression")
    sheet.note("six gradients of 1 to 8 MB; a colour is a gradient on its way")
    timelines(sheet, problem, {
        "nothing compressed": layerwise(problem, 0),
        "all compressed beside backward": layerwise(problem, 1),
        "each as is best for the step": best,
    }, {"compute": "backward", "offload": "core 2", "inter": "link"})  # fmt: skip
    words = [("sent dense", "compressed there", "on core 2")[part.option] for part in best]
    sheet.note(f"the best: {', '.join(words[:3])},")
    sheet.note(f"{', '.join(words[3:])}")
    return sheet


@picture
def mergecomp_merging() -> Drawing:
    """Timelines of twelve compressed gradients, each by itself, all together, and in the best buckets."""
    count = 12
    encode, decode = Curve.linear(1.6e-3, 0.15e-3 / 1e6), Curve.linear(0.8e-3, 0.1e-3 / 1e6)
    chain = Demand(Resource.COMPUTE, encode), link(2e-3, 1.2e-3), Demand(Resource.COMPUTE, decode)
    problem = Problem((3e-3,) * count, (1.2e6,) * count, (Option("compressed", chain),))
    best = min(curve(problem, 0), key=lambda solution: round(solution.seconds, 9))
    sheet = Drawing("Timelines of twelve compressed gradients: one by one, in one bucket, in the best buckets")
    sheet.note("12 gradients, compressed beside backward at 1.6 ms a call and more;")
    sheet.note("a colour is a bucket: encoded, sent, decoded")
    timelines(sheet, problem, {
        "each by itself": layerwise(problem, 0),
        "all in one bucket": whole(problem),
        f"the best cuts, {len(best.parts)} buckets": best.parts,
    }, LINKS)  # fmt: skip
    return sheet


@picture
def mergecomp_curve() -> Drawing:
    """The seconds of a step by the number of buckets, for ResNet-50 with signs, by the search for the best cuts."""
    problem = mergecomp_problem("resnet50")
    found = curve(problem, 0, 12)
    most = step_s(problem, layerwise(problem, 0))
    sheet = Drawing("Step time of ResNet-50 with 1-bit gradients by the number of buckets")
    sheet.note("ms from backward's begin to the end of the step, by the number of")
    sheet.note("buckets, each with the best cuts; ResNet-50, signs, 8 nodes, 10 Gbit/s")
    points = [(float(len(each.parts)), 1e3 * each.seconds) for each in found]
    low = 10 * (min(y for _, y in points) // 10)
    ticks = [low + 5 * number for number in range(7)]
    names = [str(number) for number in range(1, 13)], [f"{tick:.0f}" for tick in ticks]
    sheet.curves({BLUE: points}, [float(number) for number in range(1, 13)], ticks, names, logarithmic=False)
    sheet.note(f"each of {problem.size} gradients by itself: {1e3 * most:.0f} ms")
    return sheet


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
