"""Benchmark cases of kernels: inputs, the call, and the least bytes that the kernel must read and write.

The function of a kernel's name makes its case (`Work`), with inputs drawn from generator `g`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradsync import kernels as automatic
from gradsync.kernels import Sections, SignScale, offsets_nbytes

from . import usual

STRIPES = 8  # owners that rows are spread over by columns


@dataclass(frozen=True)
class Work:
    """A benchmark case: a kernel call with its outputs, and the least bytes that it must read and write."""

    run: Callable[[ModuleType], object]  # with gradsync.kernels.cpu, .triton or .reference
    outs: Sequence[Tensor]
    nbytes: int  # every input read once, every output written once
    usual: usual.Run | None = None  # the code that torch is timed by; None: the definition


def tensor_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def some_of(size: int, density: float, generator: torch.Generator) -> Tensor:
    """Returns (nnz,) int32, ascending: each index below `size` with probability `density`."""
    return (torch.rand(size, generator=generator) < density).nonzero().flatten().int()


def column_stripes(dim: int, n: int) -> list[tuple[int, int]]:
    return [(owner * dim // n, (owner + 1) * dim // n) for owner in range(n)]


def sum_rows(g: torch.Generator, *, ranks: int, size: int, density: float, dim: int, dtype: str) -> Work:
    """Returns the benchmark case of summing the row lists (indices and values) of `ranks` ranks into one list."""
    lists = [some_of(size, density, g) for _ in range(ranks)]
    parts = [(indices, torch.randn(len(indices), dim, generator=g).to(getattr(torch, dtype))) for indices in lists]
    union = automatic.unite_rows(lists, size).count
    out = torch.zeros(union, dtype=torch.int32), torch.zeros(union, dim, dtype=parts[0][1].dtype)
    inputs = [tensor for part in parts for tensor in part]
    return Work(lambda module: module.sum_rows(parts, size, out=out), out, tensor_bytes(*inputs, *out))


def unite_rows(g: torch.Generator, *, nnz: int, size: int, dim: int, owners: int) -> Work:
    """Returns the benchmark case of coalescing a rank's unsorted rows and cutting them into `owners` column ranges."""
    indices, values = torch.randint(size, (nnz,), generator=g), torch.randn(nnz, dim, generator=g)
    stripes = column_stripes(dim, owners)
    union = automatic.unite_rows([indices], size).count
    rows = torch.zeros(union, dtype=torch.int32)
    outs = [torch.zeros(union, stop - start) for start, stop in stripes]

    def run(module: ModuleType) -> None:
        distinct = module.unite_rows([indices], size)
        distinct.write_indices(rows)
        distinct.sum([values], outs, stripes)

    return Work(run, [rows, *outs], tensor_bytes(indices, values, rows, *outs))


def join_columns(g: torch.Generator, *, nnz: int, dim: int, owners: int) -> Work:
    """Returns the benchmark case of joining `owners` column ranges of the same rows to whole rows."""
    stripes = column_stripes(dim, owners)
    parts = [torch.randn(nnz, stop - start, generator=g) for start, stop in stripes]
    out = torch.zeros(nnz, dim)
    return Work(lambda module: module.join_columns(parts, stripes, out), [out], 2 * tensor_bytes(out))


def scatter_rows(g: torch.Generator, *, size: int, density: float, dim: int, accumulate: bool) -> Work:
    """Returns the benchmark case of setting or adding sorted rows in a table."""
    indices = some_of(size, density, g)
    values, dense = torch.randn(len(indices), dim, generator=g), torch.zeros(size, dim)
    touched = tensor_bytes(indices) + tensor_bytes(values) * (3 if accumulate else 2)
    return Work(lambda module: module.scatter_rows(indices, values, dense, accumulate=accumulate), [dense], touched)


def nonzero_rows(g: torch.Generator, *, size: int, density: float, dim: int) -> Work:
    """Returns the benchmark case of finding the non-zero rows of a dense table."""
    chosen, dense = some_of(size, density, g), torch.zeros(size, dim)
    dense[chosen] = torch.randn(len(chosen), dim, generator=g)
    rows, values = torch.zeros(len(chosen), dtype=torch.int32), torch.zeros(len(chosen), dim)

    def run(module: ModuleType) -> None:
        found = module.nonzero_rows(dense)
        found.write_indices(rows)
        found.gather([values])

    return Work(run, [rows, values], tensor_bytes(dense, rows, values))


def nonzero_elements(g: torch.Generator, *, size: int, density: float) -> Work:
    """Returns the benchmark case of finding the non-zero elements of a dense tensor."""
    chosen, x = some_of(size, density, g), torch.zeros(size)
    x[chosen] = 1.0
    indices, values = torch.zeros(len(chosen), dtype=torch.int32), torch.zeros(len(chosen))
    return Work(
        lambda module: module.nonzero_elements(x).write(indices, values),
        [indices, values],
        tensor_bytes(x, indices, values),
    )


def top_k(g: torch.Generator, *, size: int, density: float, feedback: bool = False, sections: int = 1) -> Work:
    """Returns the benchmark case of choosing the largest elements of tensors, with or without error feedback."""
    lengths = [size * (section + 1) // sections - size * section // sections for section in range(sections)]
    counts = [round(density * length) for length in lengths]
    x, k = torch.randn(size, generator=g), sum(counts)
    outs = [torch.zeros(k, dtype=torch.int32), torch.zeros(k)]
    fed: dict[str, Any] = {}
    if feedback:
        outs.append(torch.zeros(size))
        fed = {"residual": torch.randn(size, generator=g), "next_residual": outs[-1]}
    given = {"sections": Sections(tuple(lengths)), "counts": counts, **fed}
    nbytes = tensor_bytes(x, *([fed["residual"]] if feedback else []), *outs)
    as_usual = usual.top_k(x, outs[0], outs[1], lengths, counts, **fed)
    return Work(lambda module: module.top_k(x, outs[0], outs[1], **given), outs, nbytes, as_usual)


def select_above(g: torch.Generator, *, size: int, threshold: float, feedback: bool) -> Work:
    """Returns the benchmark case of selecting all elements above a threshold from normally distributed ones."""
    x = torch.randn(size, generator=g)
    residual = torch.randn(size, generator=g) if feedback else torch.zeros(size)
    count = int(((x + residual).abs() > threshold).sum())
    outs = [torch.zeros(count, dtype=torch.int32), torch.zeros(count), *([torch.zeros(size)] if feedback else [])]
    given = {"residual": residual, "next_residual": outs[-1]} if feedback else {}
    bound, read = torch.tensor([threshold]), tensor_bytes(x, *([residual] if feedback else []))

    def run(module: ModuleType) -> None:
        module.select_above(x, bound, outs[0], outs[1], **given)

    return Work(run, outs, read + tensor_bytes(*outs))


def count_above(g: torch.Generator, *, size: int, threshold: float) -> Work:
    """Returns the benchmark case of counting the elements above a threshold."""
    x, counts = torch.randn(size, generator=g), torch.zeros(1, dtype=torch.int64)
    bound = torch.tensor([threshold])
    return Work(lambda module: module.count_above(x, bound, counts), [counts], tensor_bytes(x, counts))


def squared_norms(g: torch.Generator, *, size: int, block: int) -> Work:
    """Returns the benchmark case of computing blocks' squared norms, by which blocks are chosen."""
    x, sections = torch.randn(size, generator=g), Sections((size,))
    norms = torch.zeros(-(-size // block), dtype=torch.float64)
    return Work(
        lambda module: module.squared_norms(x, sections, norms, block=block),
        [norms],
        tensor_bytes(x, norms),
        usual.squared_norms(x, norms, block),
    )


def digest(g: torch.Generator, *, size: int, tensors: int, dtype: str = "float32") -> Work:
    """Returns the benchmark case of computing the digests by which ranks compare their parameters."""
    x, out = torch.randn(size, generator=g).to(getattr(torch, dtype)), torch.zeros(tensors, dtype=torch.int64)
    parts = x.chunk(tensors)
    return Work(lambda module: module.digest(parts, out), [out], tensor_bytes(x, out))


def take_chunks(g: torch.Generator, *, size: int, chunk: int, ratio: float, dtype: str = "float32") -> Work:
    """Returns the benchmark case of copying evenly spread chunks to a payload, the others to the next residual.

    The gradients are zero in every call, as the kernel overwrites them with zeros; the residual is random.
    """
    chunks = -(-size // chunk)
    x, residual = torch.zeros(size), torch.randn(size, generator=g)
    count = max(1, round(ratio * chunks))
    chosen = torch.arange(count) * chunks // count
    outs = [
        torch.zeros(len(chosen) * chunk, dtype=getattr(torch, dtype)),
        torch.zeros(size),
        torch.zeros(chunks, dtype=torch.float64),
    ]
    return Work(
        lambda module: module.take_chunks(x, residual, chosen, *outs, chunk=chunk),
        outs,
        tensor_bytes(x, x, residual, *outs),
        usual.take_chunks(x, residual, chosen, outs[0], outs[1], outs[2], chunk),
    )


def random_k(g: torch.Generator, *, size: int, density: float, block: int) -> Work:
    """Returns the benchmark case of drawing random elements of a dense tensor, without reading it."""
    count = round(density * size / block)
    indices = torch.zeros(count * block, dtype=torch.int32)
    sections = Sections((size,), (0,), (int(torch.randint(2**62, (), generator=g)),))
    return Work(
        lambda module: module.random_k(sections, [count], indices, block=block), [indices], tensor_bytes(indices)
    )


def hadamard(g: torch.Generator, *, size: int, chunk: int, inverse: bool) -> Work:
    """Returns the benchmark case of rotating a dense tensor at random, or back."""
    x, out = torch.randn(size, generator=g), torch.zeros(size)
    sections = Sections((size,), (0,), (int(torch.randint(2**62, (), generator=g)),))
    return Work(
        lambda module: module.hadamard(x, sections, out, chunk=chunk, inverse=inverse),
        [out],
        tensor_bytes(x, out),
        usual.hadamard(x, out, chunk, inverse),
    )


def count_sketch(g: torch.Generator, *, size: int, ratio: float, rows: int) -> Work:
    """Returns the benchmark case of adding a dense tensor into the counters of a count sketch."""
    sections, columns, x, counters = _sketch(g, size, ratio, rows)
    return Work(
        lambda module: module.count_sketch(x, sections, columns, counters, rows=rows),
        [counters],
        tensor_bytes(x, counters),
    )


def sketch_estimates(g: torch.Generator, *, size: int, ratio: float, rows: int) -> Work:
    """Returns the benchmark case of estimating each element from the counters of a count sketch."""
    sections, columns, x, counters = _sketch(g, size, ratio, rows)
    counters.copy_(torch.randn(len(counters), generator=g))
    return Work(
        lambda module: module.sketch_estimates(counters, sections, columns, x, rows=rows),
        [x],
        tensor_bytes(x, counters),
    )


def _sketch(g: torch.Generator, size: int, ratio: float, rows: int) -> tuple[Sections, list[int], Tensor, Tensor]:
    """Returns a section (range of a flat tensor), the sketch's number of columns, the elements, and empty counters."""
    sections = Sections((size,), (0,), (int(torch.randint(2**62, (), generator=g)),))
    columns = [round(ratio * size / rows / 32) * 32]
    return sections, columns, torch.randn(size, generator=g), torch.zeros(rows * columns[0])


def _signs(
    g: torch.Generator, size: int, block: int, scale: SignScale
) -> tuple[Sections, dict[str, Any], Tensor, tuple[Tensor, Tensor]]:
    """Returns a section (range of a flat tensor), the kernel's options, the elements, and empty signs and scales."""
    sections, options = Sections((size,)), {"block": block, "scale": scale}
    scales = torch.zeros(automatic.sign_scales_shape(sections, block=block, scale=scale))
    return sections, options, torch.randn(size, generator=g), (torch.zeros(-(-size // 8), dtype=torch.uint8), scales)


def pack_signs(g: torch.Generator, *, size: int, block: int, scale: SignScale, feedback: bool) -> Work:
    """Returns the benchmark case of encoding a dense tensor as signs and scales, with or without error feedback."""
    sections, options, x, outs = _signs(g, size, block, scale)
    residuals = [torch.randn(size, generator=g), torch.zeros(size)] if feedback else []
    options |= dict(zip(("residual", "next_residual"), residuals, strict=False))
    return Work(
        lambda module: module.pack_signs(x, sections, *outs, **options),
        [*outs, *residuals[1:]],
        tensor_bytes(x, *outs, *residuals),
        usual.pack_signs(x, *outs, **options),
    )


def unpack_signs(g: torch.Generator, *, size: int, block: int, scale: SignScale, ranks: int) -> Work:
    """Returns the benchmark case of decoding and summing the signs of `ranks` ranks."""
    sections, options, out, _ = _signs(g, size, block, scale)
    parts = []
    for _ in range(ranks):
        _, _, x, part = _signs(g, size, block, scale)
        automatic.pack_signs(x, sections, *part, **options)
        parts.append(part)
    inputs = [tensor for part in parts for tensor in part]
    return Work(lambda module: module.unpack_signs(parts, sections, out, **options), [out], tensor_bytes(out, *inputs))


def _bitmap(g: torch.Generator, size: int, density: float) -> tuple[Tensor, Tensor]:
    indices, words = some_of(size, density, g), torch.zeros(-(-size // 64), dtype=torch.int64)
    automatic.encode_bitmap(indices, size, words)
    return indices, words


def encode_bitmap(g: torch.Generator, *, size: int, density: float) -> Work:
    """Returns the benchmark case of encoding indices as bits."""
    indices, words = _bitmap(g, size, density)
    return Work(lambda module: module.encode_bitmap(indices, size, words), [words], tensor_bytes(indices, words))


def decode_bitmap(g: torch.Generator, *, size: int, density: float) -> Work:
    """Returns the benchmark case of decoding bits to indices."""
    indices, words = _bitmap(g, size, density)
    return Work(lambda module: module.decode_bitmap(words, indices), [indices], tensor_bytes(indices, words))


def count_bits(g: torch.Generator, *, size: int, density: float) -> Work:
    """Returns the benchmark case of counting a bitmap's indices."""
    _, words = _bitmap(g, size, density)
    count = torch.zeros(1, dtype=torch.int64)
    return Work(lambda module: count.fill_(module.count_bits(words)), [count], tensor_bytes(words))


def _offsets(g: torch.Generator, size: int, density: float, bits: int) -> tuple[Tensor, Tensor]:
    indices = some_of(size, density, g)
    message = torch.zeros(offsets_nbytes(len(indices), size, bits), dtype=torch.uint8)
    automatic.encode_offsets(indices, size, bits, message)
    return indices, message


def narrow(g: torch.Generator, *, size: int, dtype: str) -> Work:
    """Returns the benchmark case of scaling gradients and rounding them to 16 bits."""
    x, out = torch.randn(size, generator=g), torch.zeros(size, dtype=getattr(torch, dtype))
    return Work(lambda module: module.narrow(x, out, scale=0.25), [out], tensor_bytes(x, out))


def sum_parts(g: torch.Generator, *, size: int, ranks: int, dtype: str) -> Work:
    """Returns the benchmark case of averaging the gradients of `ranks` ranks."""
    parts = [torch.randn(size, generator=g).to(getattr(torch, dtype)) for _ in range(ranks)]
    out, scale = torch.zeros(size), 1 / ranks
    return Work(
        lambda module: module.sum_parts(parts, out, scale=scale),
        [out],
        tensor_bytes(*parts, out),
        usual.sum_parts(parts, out, scale),
    )


def encode_offsets(g: torch.Generator, *, size: int, density: float, bits: int) -> Work:
    """Returns the benchmark case of encoding indices as offsets within blocks."""
    indices, message = _offsets(g, size, density, bits)
    nbytes = tensor_bytes(indices, message)
    return Work(lambda module: module.encode_offsets(indices, size, bits, message), [message], nbytes)


def decode_offsets(g: torch.Generator, *, size: int, density: float, bits: int) -> Work:
    """Returns the benchmark case of decoding offsets within blocks to indices."""
    indices, message = _offsets(g, size, density, bits)
    nbytes = tensor_bytes(indices, message)
    return Work(lambda module: module.decode_offsets(message, size, bits, indices), [indices], nbytes)


def _elements(g: torch.Generator, size: int, nnz: int) -> Tensor:
    """Returns about `nnz` random indices below `size`, ascending, int32."""
    elements: Tensor = torch.unique(torch.randint(size, (nnz,), generator=g))
    return elements.int()


def partition_rotated(g: torch.Generator, *, nnz: int, size: int, owners: int) -> Work:
    """Returns the benchmark case of splitting elements among `owners` ranks, neighbours to different ones in turn."""
    return _partition(g, nnz, size, lambda module, indices: module.partition_rotated(indices, size, owners, 1))


def partition_hashed(g: torch.Generator, *, nnz: int, size: int, owners: int) -> Work:
    """Returns the benchmark case of splitting sorted elements among `owners` ranks by a hash of their indices."""
    return _partition(g, nnz, size, lambda module, indices: module.partition_hashed(indices, size, owners, 1))


def _partition(g: torch.Generator, nnz: int, size: int, split: Callable[[Any, Tensor], Any]) -> Work:
    indices = _elements(g, size, nnz)
    values = torch.randn(len(indices), generator=g)
    counts = split(automatic, indices).counts
    places = [torch.zeros(count, dtype=torch.int32) for count in counts]
    outs = [torch.zeros(count) for count in counts]
    return Work(
        lambda module: split(module, indices).write(values, places, outs),
        [*places, *outs],
        2 * tensor_bytes(indices, values),
    )


def owners_by_hash(g: torch.Generator, *, nnz: int, size: int, owners: int) -> Work:
    """Returns the benchmark case of computing which of `owners` ranks each element is hashed to."""
    indices = _elements(g, size, nnz)
    out = torch.zeros_like(indices)
    return Work(lambda module: module.owners_by_hash(indices, owners, 1, out), [out], tensor_bytes(indices, out))


def owned_by_hash(g: torch.Generator, *, size: int, owners: int) -> Work:
    """Returns the benchmark case of listing the elements that hash to each of `owners` ranks, in new memory."""
    out = torch.zeros(size, dtype=torch.int32)

    def run(module: ModuleType) -> None:
        torch.cat(module.owned_by_hash(size, owners, 1, device=out.device), out=out)

    return Work(run, [out], tensor_bytes(out))


def hierarchical_hash(g: torch.Generator, *, nnz: int, size: int, owners: int) -> Work:
    """Returns the benchmark case of hashing elements to `owners` ranks, in tables of 2.2 slots an element."""
    indices = _elements(g, size, nnz)
    slots, counts = 2 * len(indices), torch.zeros(owners, dtype=torch.int64)

    def run(module: ModuleType) -> None:
        found = module.hierarchical_hash(indices, owners, slots=slots, serial=slots // 10, seed=1)
        counts.copy_(torch.tensor([len(owned) for owned in found.owned]))

    return Work(run, [counts], 2 * tensor_bytes(indices))


def positions_in(g: torch.Generator, *, size: int, density: float, owners: int) -> Work:
    """Returns the benchmark case of finding elements' places in the list of all elements that hash to one rank."""
    owned = automatic.owned_by_hash(size, owners, 1)[0].clone()  # the copy is made on the measured device
    indices = owned[some_of(len(owned), density, g)]
    out = torch.zeros_like(indices)
    return Work(lambda module: module.positions_in(owned, indices, out), [out], tensor_bytes(owned, indices, out))


def rotated_index(g: torch.Generator, *, nnz: int, size: int, owners: int) -> Work:
    """Returns the benchmark case of mapping places in one rank's part of `partition_rotated` back to indices."""
    positions, _ = _parts(g, nnz=nnz, size=size, owners=owners)
    out = torch.zeros_like(positions[0])
    return Work(
        lambda module: module.rotated_index(0, positions[0], owners, 1, out), [out], tensor_bytes(positions[0], out)
    )


def _room(count: int, size: int) -> automatic.PackedPositions:
    """Returns an empty buffer for `count` positions below `size`, in the smallest format."""
    nbytes, bits = min((automatic.packed_nbytes(count, size, bits), bits) for bits in (1, 8, 16, 32))
    return automatic.PackedPositions(torch.zeros(-(-nbytes // 8) * 8, dtype=torch.uint8), count, bits)


def _messages(x: Tensor, owners: int) -> tuple[list[automatic.PackedPositions], list[Tensor]]:
    """Returns empty buffers for the positions and values of the elements of `x` that each of `owners` ranks is sent."""
    counts = automatic.partition_elements(x, owners, 1).counts
    return [_room(count, -(-len(x) // owners)) for count in counts], [torch.zeros(count) for count in counts]


def _sparse(g: torch.Generator, size: int, density: float) -> Tensor:
    chosen, x = some_of(size, density, g), torch.zeros(size)
    x[chosen] = torch.randn(len(chosen), generator=g)
    return x


def _packed_bytes(parts: Sequence[automatic.PackedPositions], values: Sequence[Tensor]) -> int:
    return tensor_bytes(*(part.packed for part in parts), *values)


def partition_elements(g: torch.Generator, *, size: int, density: float, owners: int) -> Work:
    """Returns the benchmark case of splitting a dense vector's non-zeros into a message for each of `owners` ranks."""
    x = _sparse(g, size, density)
    parts, values = _messages(x, owners)
    packed = [part.packed for part in parts]
    return Work(
        lambda module: module.partition_elements(x, owners, 1).write(parts, values),
        [*packed, *values],
        tensor_bytes(x) + _packed_bytes(parts, values),
    )


def _of_ranks(
    g: torch.Generator, ranks: int, size: int, density: float
) -> tuple[list[automatic.PackedPositions], list[Tensor]]:
    """Returns the positions and the values of a sparse vector of each of `ranks` ranks."""
    parts, values = [], []
    for _ in range(ranks):
        x = _sparse(g, size, density)
        (part,), (value,) = _messages(x, 1)
        automatic.partition_elements(x, 1, 1).write([part], [value])
        parts.append(part)
        values.append(value)
    return parts, values


def unite_elements(g: torch.Generator, *, ranks: int, size: int, density: float) -> Work:
    """Returns the benchmark case of summing sparse vectors of `ranks` ranks, each given as positions and values."""
    parts, values = _of_ranks(g, ranks, size, density)
    total = _room(automatic.unite_elements(parts, size).count, size)
    sums = torch.zeros(total.count)
    return Work(
        lambda module: module.unite_elements(parts, size).sum(values, total, sums),
        [total.packed, sums],
        _packed_bytes([*parts, total], [*values, sums]),
    )


def unite_messages(g: torch.Generator, *, ranks: int, size: int, density: float, dim: int) -> Work:
    """Returns the benchmark case of summing rows of `ranks` ranks, whose positions come packed in messages."""
    parts, elements = _of_ranks(g, ranks, size, density)
    values = [each.view(-1, 1).expand(-1, dim).contiguous() for each in elements]
    total = torch.zeros(automatic.unite_messages(parts, size).count, dim)
    return Work(
        lambda module: module.unite_messages(parts, size).sum(values, [total]),
        [total],
        _packed_bytes(parts, [*values, total]),
    )


def join_elements(g: torch.Generator, *, size: int, density: float, owners: int) -> Work:
    """Returns the benchmark case of writing the disjoint sparse sums of `owners` ranks into one dense vector."""
    x = _sparse(g, size, density)
    parts, values = _messages(x, owners)
    automatic.partition_elements(x, owners, 1).write(parts, values)
    out = torch.zeros(size)
    nbytes = _packed_bytes(parts, values) + tensor_bytes(out)
    return Work(lambda module: module.join_elements(parts, values, 1, out), [out], nbytes)


def _parts(g: torch.Generator, *, nnz: int, size: int, owners: int) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parts of random elements that `owners` ranks get: positions in a rank's part, and values."""
    indices = _elements(g, size, nnz)
    partition = automatic.partition_rotated(indices, size, owners, 1)
    positions = [torch.zeros(count, dtype=torch.int32) for count in partition.counts]
    values = [torch.zeros(count) for count in partition.counts]
    partition.write(torch.randn(len(indices), generator=g), positions, values)
    return positions, values


def _grid(block: int, **settings: Any) -> automatic.AnyGrid:
    """Returns a quantisation grid: of small floats if the settings name a format, else of integer levels."""
    return (
        automatic.FloatGrid(block=block, **settings)
        if "format" in settings
        else automatic.Grid(block=block, **settings)
    )


def quantize(g: torch.Generator, *, size: int, feedback: bool = False, **settings: Any) -> Work:
    """Returns the benchmark case of quantising a gradient to codes of few bits, with or without error feedback."""
    grid, sections = _grid(**settings), Sections((size,), seeds=(1,))
    x, codes, scales = torch.randn(size, generator=g), *_coded(sections, grid)
    kept = {name: torch.zeros(size) for name in ("residual", "next_residual")} if feedback else {}

    def run(module: ModuleType) -> None:
        module.quantize(x, sections, grid, codes, scales, **kept)

    outs = [codes, scales, *(kept[name] for name in kept if name == "next_residual")]
    return Work(
        run, outs, tensor_bytes(x, codes, scales, *kept.values()), usual.quantize(x, codes, scales, grid, **kept)
    )


def block_scales(g: torch.Generator, *, size: int, **settings: Any) -> Work:
    """Returns the benchmark case of computing the scales that ranks agree on before sending summable codes."""
    grid, sections = _grid(**settings), Sections((size,))
    x, (_, scales) = torch.randn(size, generator=g), _coded(sections, grid)
    return Work(lambda module: module.block_scales(x, sections, grid, scales), [scales], tensor_bytes(x, scales))


def dequantize(g: torch.Generator, *, size: int, ranks: int, **settings: Any) -> Work:
    """Returns the benchmark case of decoding and summing the codes of `ranks` ranks."""
    grid, sections = _grid(**settings), Sections((size,), seeds=(1,))
    parts, out = [_coded(sections, grid) for _ in range(ranks)], torch.zeros(size)
    for codes, scales in parts:
        automatic.quantize(torch.randn(size, generator=g), sections, grid, codes, scales)
    nbytes = tensor_bytes(out, *(tensor for part in parts for tensor in part))
    return Work(
        lambda module: module.dequantize(parts, sections, grid, out, scale=1 / ranks),
        [out],
        nbytes,
        usual.dequantize(parts, out, grid),
    )


def _coded(sections: Sections, grid: automatic.AnyGrid) -> tuple[Tensor, Tensor]:
    """Returns empty tensors for the codes and block scales of a quantised tensor."""
    codes = torch.zeros(automatic.codes_nbytes(sections, grid), dtype=torch.uint8)
    return codes, torch.zeros(automatic.num_scales(sections, grid))


WORK: dict[str, Callable[..., Work]] = {
    work.__name__: work
    for work in (
        sum_rows, unite_rows, join_columns, scatter_rows, nonzero_rows, nonzero_elements, encode_bitmap, decode_bitmap,
        count_bits, encode_offsets, decode_offsets, partition_elements, unite_elements,
        unite_messages, join_elements, partition_rotated, rotated_index, owners_by_hash,
        partition_hashed, owned_by_hash, positions_in, hierarchical_hash, top_k, select_above, count_above, narrow,
        sum_parts, quantize, block_scales, dequantize, random_k, hadamard, pack_signs, unpack_signs,
        count_sketch, sketch_estimates, squared_norms, take_chunks, digest,
    )
}  # fmt: skip
_TABLE = {"ranks": 8, "size": 1_250_000, "dtype": "float32"}  # an eighth of ten million rows: one of 8 owners' share
_BITS = 1_250_000
_DENSE = 32 << 20  # elements
_ELEMENTS = 1 << 28
CASES: tuple[tuple[str, dict[str, Any]], ...] = (  # kernel, parameters of its work
    ("sum_rows", {**_TABLE, "density": 0.01, "dim": 1}),
    ("sum_rows", {**_TABLE, "density": 0.1, "dim": 1}),
    ("sum_rows", {**_TABLE, "density": 0.01, "dim": 16}),
    ("sum_rows", {**_TABLE, "density": 0.1, "dim": 16}),
    ("sum_rows", {**_TABLE, "density": 0.01, "dim": 64}),
    ("sum_rows", {**_TABLE, "density": 0.1, "dim": 64}),
    ("sum_rows", {**_TABLE, "density": 0.1, "dim": 64, "dtype": "bfloat16"}),
    ("unite_rows", {"nnz": 1_000_000, "size": 4_000_000, "dim": 16, "owners": STRIPES}),
    ("unite_rows", {"nnz": 500_000, "size": 2_000_000, "dim": 64, "owners": STRIPES}),
    ("unite_rows", {"nnz": 100_000, "size": 400_000, "dim": 512, "owners": STRIPES}),
    ("unite_rows", {"nnz": 4096, "size": 1 << 27, "dim": 32, "owners": STRIPES}),
    ("join_columns", {"nnz": 1_000_000, "dim": 16, "owners": STRIPES}),
    ("join_columns", {"nnz": 500_000, "dim": 64, "owners": STRIPES}),
    ("join_columns", {"nnz": 60_000, "dim": 512, "owners": STRIPES}),
    ("scatter_rows", {"size": _DENSE // 16, "density": 0.1, "dim": 16, "accumulate": False}),
    ("scatter_rows", {"size": _DENSE // 16, "density": 0.1, "dim": 16, "accumulate": True}),
    ("scatter_rows", {"size": _DENSE // 64, "density": 0.1, "dim": 64, "accumulate": False}),
    ("scatter_rows", {"size": _DENSE // 64, "density": 0.1, "dim": 64, "accumulate": True}),
    ("nonzero_rows", {"size": _DENSE // 16, "density": 0.01, "dim": 16}),
    ("nonzero_rows", {"size": _DENSE // 64, "density": 0.1, "dim": 64}),
    ("nonzero_elements", {"size": _DENSE, "density": 0.001}),
    ("nonzero_elements", {"size": _DENSE, "density": 0.05}),
    ("encode_bitmap", {"size": _BITS, "density": 0.01}),
    ("encode_bitmap", {"size": _BITS, "density": 0.1}),
    ("decode_bitmap", {"size": _BITS, "density": 0.01}),
    ("decode_bitmap", {"size": _BITS, "density": 0.1}),
    ("count_bits", {"size": _BITS, "density": 0.1}),
    ("encode_offsets", {"size": 40 * _BITS, "density": 0.001, "bits": 16}),
    ("encode_offsets", {"size": 40 * _BITS, "density": 0.01, "bits": 8}),
    ("encode_offsets", {"size": _BITS, "density": 0.1, "bits": 8}),
    ("decode_offsets", {"size": 40 * _BITS, "density": 0.001, "bits": 16}),
    ("decode_offsets", {"size": 40 * _BITS, "density": 0.01, "bits": 8}),
    ("decode_offsets", {"size": _BITS, "density": 0.1, "bits": 8}),
    ("partition_elements", {"size": _DENSE, "density": 0.001, "owners": 8}),
    ("partition_elements", {"size": _DENSE, "density": 0.01, "owners": 8}),
    ("partition_elements", {"size": _DENSE, "density": 0.1, "owners": 8}),
    ("unite_elements", {"ranks": 8, "size": _DENSE // 8, "density": 0.01}),
    ("unite_elements", {"ranks": 8, "size": _DENSE // 8, "density": 0.1}),
    ("unite_messages", {"ranks": 8, "size": _BITS, "density": 0.01, "dim": 2}),
    ("join_elements", {"size": _DENSE, "density": 0.01, "owners": 8}),
    ("join_elements", {"size": _DENSE, "density": 0.1, "owners": 8}),
    ("partition_rotated", {"nnz": 1_000_000, "size": _ELEMENTS, "owners": 8}),
    ("partition_rotated", {"nnz": 1_000_000, "size": _ELEMENTS, "owners": 64}),
    ("rotated_index", {"nnz": 1_000_000, "size": _ELEMENTS, "owners": 8}),
    ("owners_by_hash", {"nnz": 1_000_000, "size": _ELEMENTS, "owners": 8}),
    ("partition_hashed", {"nnz": 1_000_000, "size": _ELEMENTS, "owners": 8}),
    ("partition_hashed", {"nnz": 1_000_000, "size": _ELEMENTS, "owners": 64}),
    ("owned_by_hash", {"size": 8 * _BITS, "owners": 8}),
    ("positions_in", {"size": _DENSE, "density": 0.01, "owners": 8}),
    ("positions_in", {"size": _DENSE, "density": 0.1, "owners": 8}),
    ("hierarchical_hash", {"nnz": 1_000_000, "size": _ELEMENTS, "owners": 8}),
    ("narrow", {"size": _DENSE, "dtype": "bfloat16"}),
    ("narrow", {"size": _DENSE, "dtype": "float16"}),
    ("sum_parts", {"size": _DENSE, "ranks": 1, "dtype": "bfloat16"}),
    ("sum_parts", {"size": _DENSE, "ranks": 4, "dtype": "bfloat16"}),
    ("sum_parts", {"size": _DENSE, "ranks": 4, "dtype": "float32"}),
    ("top_k", {"size": 8 * _BITS, "density": 0.001}),
    ("top_k", {"size": 100 * 5000, "density": 0.01, "feedback": True, "sections": 100}),
    ("top_k", {"size": 8 * _BITS, "density": 0.01}),
    ("squared_norms", {"size": _DENSE, "block": 64}),
    ("squared_norms", {"size": _DENSE, "block": 256}),
    ("digest", {"size": _DENSE, "tensors": 1}),
    ("digest", {"size": _DENSE, "tensors": 256}),
    ("digest", {"size": _DENSE, "tensors": 1, "dtype": "bfloat16"}),
    ("take_chunks", {"size": _DENSE, "chunk": 32768, "ratio": 0.1}),
    ("take_chunks", {"size": _DENSE, "chunk": 32768, "ratio": 0.1, "dtype": "bfloat16"}),
    ("take_chunks", {"size": _BITS, "chunk": 32768, "ratio": 0.1}),
    ("random_k", {"size": _DENSE, "density": 0.01, "block": 1}),
    ("random_k", {"size": _DENSE, "density": 0.01, "block": 64}),
    ("hadamard", {"size": 8 * _BITS, "chunk": 4096, "inverse": False}),
    ("hadamard", {"size": 8 * _BITS, "chunk": 4096, "inverse": True}),
    ("count_sketch", {"size": 8 * _BITS, "ratio": 0.05, "rows": 5}),
    ("sketch_estimates", {"size": 8 * _BITS, "ratio": 0.05, "rows": 5}),
    ("pack_signs", {"size": _DENSE, "block": 0, "scale": "mean", "feedback": False}),
    ("pack_signs", {"size": _DENSE, "block": 0, "scale": "mean", "feedback": True}),
    ("pack_signs", {"size": _DENSE, "block": 32768, "scale": "mean", "feedback": True}),
    ("pack_signs", {"size": _DENSE, "block": 0, "scale": "two", "feedback": True}),
    ("unpack_signs", {"size": _DENSE, "block": 0, "scale": "mean", "ranks": 1}),
    ("unpack_signs", {"size": _DENSE, "block": 0, "scale": "mean", "ranks": 8}),
    ("top_k", {"size": 8 * _BITS, "density": 0.01, "feedback": True}),
    ("select_above", {"size": 8 * _BITS, "threshold": 3.5, "feedback": True}),
    ("count_above", {"size": 8 * _BITS, "threshold": 2.5}),
    ("quantize", {"size": _DENSE, "levels": 127, "bits": 8, "block": 256}),
    ("quantize", {"size": _DENSE, "levels": 127, "bits": 8, "block": 256, "feedback": True}),
    ("quantize", {"size": _DENSE, "levels": 127, "bits": 8, "block": 512, "scale": "norm", "stochastic": True}),
    ("quantize", {"size": _DENSE, "levels": 7, "bits": 4, "block": 256}),
    ("quantize", {"size": _DENSE, "levels": 1, "bits": 2, "block": 0, "stochastic": True}),
    ("quantize", {"size": _DENSE, "format": "e4m3", "block": 256}),
    ("quantize", {"size": _DENSE, "format": "exponent", "block": 0}),
    ("block_scales", {"size": _DENSE, "levels": 127, "bits": 8, "block": 256}),
    ("dequantize", {"size": _DENSE, "ranks": 1, "levels": 127, "bits": 8, "block": 256}),
    ("dequantize", {"size": _DENSE, "ranks": 8, "levels": 127, "bits": 8, "block": 256}),
    ("dequantize", {"size": _DENSE, "ranks": 1, "levels": 7, "bits": 4, "block": 256}),
    ("dequantize", {"size": _DENSE, "ranks": 1, "format": "e4m3", "block": 256}),
    ("dequantize", {"size": _DENSE, "ranks": 1, "format": "exponent", "block": 0}),
)
