"""Rules of other systems that decide for each gradient (item) alone: HiPress' SeCoPa and BytePS-Compress.

The rules disregard overlap with backward and all other gradients, unlike gradsync's search. Cost curves and default
settings that these systems have for other clusters are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.planner.solver.problem import Curve, Part, Problem


@dataclass(frozen=True)
class SeCoPa:
    """HiPress' rule (Bai et al., SOSP 2021): whether to compress a gradient, into how many partitions, by its own cost.

    Partitions of a gradient are handled in parallel, sends and kernels of a partition in sequence. With n nodes and k
    partitions, a parameter server takes 2(n-1) sends, min(k+1, n) encodings and min(n-1+k, 2(n-1)) decodings; a ring
    takes 2(n-1) sends, n encodings and n decodings.
    """

    nodes: int
    send: Curve  # of bytes on the wire
    encode: Curve  # of dense bytes
    decode: Curve  # of dense bytes
    wire_ratio: float  # bytes on the wire for each dense byte that is compressed
    ring: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(f"SeCoPa.nodes must be 2 or more, got {self.nodes}")
        if not 0 < self.wire_ratio:
            raise ValueError(f"SeCoPa.wire_ratio must be positive, got {self.wire_ratio}")

    def dense_s(self, nbytes: float, partitions: int) -> float:
        return 2 * (self.nodes - 1) * self.send(nbytes / partitions)

    def compressed_s(self, nbytes: float, partitions: int) -> float:
        others = self.nodes - 1
        encodes = self.nodes if self.ring else min(partitions + 1, self.nodes)
        decodes = self.nodes if self.ring else min(others + partitions, 2 * others)
        one = nbytes / partitions
        return 2 * others * self.send(self.wire_ratio * one) + encodes * self.encode(one) + decodes * self.decode(one)

    def choose(self, nbytes: float) -> tuple[bool, int]:
        """Returns whether to compress a gradient of so many bytes, and its partitions, 1 to `nodes`, by least cost.

        Of equal costs, dense wins, then the fewest partitions.
        """
        ways = [(compress, count) for compress in (False, True) for count in range(1, self.nodes + 1)]
        return min(ways, key=lambda way: (self.compressed_s if way[0] else self.dense_s)(nbytes, way[1]))

    def parts(self, problem: Problem, dense: int, compressed: int) -> tuple[Part, ...]:
        """Returns a bucket (`Part`) for each gradient, by option `compressed` where the rule compresses, else `dense`.

        The rule's number of partitions is not used: the option says how gradients are exchanged. A gradient that may
        not take its option takes the first that it may.
        """
        return _each(problem, dense, compressed, [self.choose(nbytes)[0] for nbytes in problem.nbytes])


def byteps_compress(problem: Problem, dense: int, offloaded: int, smallest_bytes: float = 65536) -> tuple[Part, ...]:
    """Returns a bucket per gradient: from `smallest_bytes` on compressed on the host (`offloaded`), else `dense`."""
    return _each(problem, dense, offloaded, [nbytes >= smallest_bytes for nbytes in problem.nbytes])


def _each(problem: Problem, dense: int, compressed: int, compress: list[bool]) -> tuple[Part, ...]:
    """Returns a bucket (`Part`) for each gradient, with the option `compressed` where `compress` is true, else `dense`.

    A gradient that may not take its option takes the first that it may.
    """
    parts = []
    for item, chosen in enumerate(compress):
        option = compressed if chosen else dense
        if problem.allowed is not None and option not in problem.allowed[item]:
            option = min(problem.allowed[item])
        parts.append(Part(item, item + 1, option))
    return tuple(parts)
