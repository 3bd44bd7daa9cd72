"""Footprints: the indices of a gradient's non-zero rows and elements, without values, for figures of sparsity.

A footprint may cover a sample: a hash selects one row of every `step` neighbouring ones (elements, if a tensor has no
rows), the same on all ranks. So a few rows give unbiased estimates of densities, overlaps and unions, and regions with
many non-zero rows have their share in the sample.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..inputs.files import from_json
from ..kernels.reference.rotated import rotation
from ..tensors.density import FEWEST_SAMPLED, MOST_FOUND
from ..tensors.sparse import SparseRows

Gradient = Tensor | SparseRows | None
"""A gradient, dense or sparse, of any shape; None if the rank did not use the parameter."""

DEFAULT_SAMPLE = 1 << 15  # rows; estimates a density of 1 % to within 5.5 % of it in one step (one standard error)
LOOKS = 1024  # elements of a dense gradient that are read to see whether it is mostly zero
VERSION = 1


@dataclass(frozen=True)
class Shape:
    """The shape of a gradient, seen as `units` rows of `dim` elements.

    A tensor of fewer than two dimensions has no rows: its units are its elements.
    """

    shape: tuple[int, ...]

    @classmethod
    def of(cls, gradient: Tensor | SparseRows) -> Shape:
        if isinstance(gradient, SparseRows):
            return cls((gradient.num_rows, gradient.dim))
        return cls(tuple(gradient.shape))

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def dim(self) -> int:
        """The number of elements of a row, or 1 for a tensor of fewer than two dimensions, which has no rows."""
        return int(torch.Size(self.shape[1:]).numel()) if len(self.shape) > 1 else 1

    @property
    def units(self) -> int:
        """The number of rows, or of elements for a tensor without rows; samples are drawn of these."""
        return self.shape[0] if len(self.shape) > 1 else self.numel


@dataclass(frozen=True)
class Sampling:
    """A rule to read one of every `step` neighbouring rows (or elements, of a tensor without rows); 1 reads all.

    `step` is a power of two. A hash chooses the row, the same on all ranks.
    """

    step: int = 1

    @classmethod
    def at_most(cls, sample: int | None, units: int) -> Sampling:
        """Returns the rule that samples at most `sample` of a tensor's `units` rows or elements; None: all of them."""
        step = 1
        while sample is not None and step * sample < units:
            step *= 2
        return cls(step)

    def places(self, units: int) -> Tensor:
        """Returns the indices of the rows (or elements) that are sampled of `units` in all, ascending, (n,) int64."""
        return torch.arange(units) if self.step == 1 else _places(units, self.step)

    def chosen(self, units: Tensor, of: int) -> Tensor:
        """Returns which entries of `units` are in the sample, as positions in `units`, (n,) int64.

        Args:
            units: (m,) int64, indices of rows, or of elements of a tensor without rows.
            of: the number of rows or elements of the whole tensor.
        """
        return _in_sample(of, self.step).to(units.device).index_select(0, units).nonzero().squeeze(1)


SEED = 0x5EED  # of the hash that draws samples; another seed of the same hash assigns rows to owners


@lru_cache(maxsize=256)
def _places(units: int, step: int) -> Tensor:
    runs = torch.arange(-(-units // step))
    places = runs * step + rotation(runs, step, SEED)
    return places[places < units]


@lru_cache(maxsize=64)
def _in_sample(units: int, step: int) -> Tensor:
    """Returns which rows or elements are sampled, one of every `step`: (units,) bool; faster than hashing indices."""
    mask = torch.zeros(units, dtype=torch.bool)
    mask[_places(units, step)] = True
    return mask


@dataclass(frozen=True)
class Footprint:
    """The indices of a gradient's non-zero rows and elements, without values, of one tensor on one rank in one step.

    Attributes:
        shape: the shape of the gradient.
        sampling: which rows were read (elements, of a tensor without rows).
        units: (n,) int64, ascending: rows read that are not all zero (elements, of a tensor without rows); of a sparse
            gradient, the rows that it stores.
        elements: (nnz,) int64, ascending: indices of non-zero elements within `units`; None: all of them.
        sparse: whether the gradient had the sparse layout, or was `SparseRows`.
        full: whether the gradient counts as without zeros (small, not contiguous, or more than half non-zero); indices
            are not kept then.
    """

    shape: Shape
    sampling: Sampling
    units: Tensor  # sampled units that are not zero, ascending int64; for a sparse gradient, the ones it stores
    elements: Tensor | None = None  # indices of non-zero elements within `units`, ascending int64; None: all of them
    sparse: bool = False  # the gradient had the sparse layout, or was SparseRows
    full: bool = False

    @classmethod
    def of(cls, gradient: Gradient, shape: Shape, sample: int | None = None) -> Footprint:
        """Returns the indices of a gradient's non-zero rows and elements, without values, as a `Footprint`.

        NaN, infinity and subnormal numbers count as non-zero, -0.0 as zero.

        Args:
            gradient: dense, sparse or `SparseRows`; None for a parameter that this rank did not use.
            shape: the gradient's shape, needed where it is None.
            sample: the most rows to read (elements, if `shape` has no rows); dense gradients that are small, mostly
                non-zero or not contiguous then count as without zeros (`full`). None reads all.

        Raises:
            ValueError: for indices out of range, or a sparse tensor that is not COO with one sparse dimension.
        """
        sampling = Sampling.at_most(sample, shape.units)
        if gradient is None or (isinstance(gradient, SparseRows) and not gradient.present):
            return cls(shape, sampling, torch.empty(0, dtype=torch.int64))
        if isinstance(gradient, SparseRows) or gradient.layout is not torch.strided:
            rows = gradient if isinstance(gradient, SparseRows) else SparseRows.from_torch(gradient.detach())
            return cls(shape, sampling, *_of_rows(rows, sampling), sparse=True)
        gradient = gradient.detach()
        if sample is not None and _is_full(gradient):
            return cls(shape, sampling, torch.empty(0, dtype=torch.int64), full=True)
        return cls(shape, sampling, *_of_dense(gradient, shape, sampling))

    def element_indices(self) -> Tensor:
        """Returns the indices of the sampled non-zero elements in the flattened gradient, ascending, (nnz,) int64."""
        if self.elements is not None:
            return self.elements
        return (self.units[:, None] * self.shape.dim + torch.arange(self.shape.dim)).flatten()


def _of_rows(rows: SparseRows, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Returns indices of a row-sparse gradient's sampled rows, and of non-zero elements in them (None: all are).

    Values of repeated rows are summed first.
    """
    indices, values = rows.indices, rows.values
    if indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= rows.num_rows:
            raise ValueError(f"row indices must be in [0, {rows.num_rows}), got {low} to {high}")
    if sampling.step > 1:
        chosen = sampling.chosen(indices, rows.num_rows)
        indices, values = indices.index_select(0, chosen), values.detach().index_select(0, chosen)
    if not indices.numel():
        return torch.empty(0, dtype=torch.int64), None
    units, sums = kernels.sum_rows([(indices, values)], rows.num_rows)
    units = units.cpu().long()
    return units, _elements_in(units, (sums != 0).cpu(), len(units))


def _of_dense(gradient: Tensor, shape: Shape, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    table = gradient.reshape(shape.units, shape.dim)
    places = sampling.places(shape.units)
    if sampling.step > 1:
        table = table[places.to(table.device)]
    nonzero = (table != 0).cpu()
    touched = torch.from_numpy(nonzero.numpy().any(axis=1))  # NumPy's any and flatnonzero are faster than torch's
    units = places[touched]
    return units, _elements_in(places, nonzero, len(units))


def _elements_in(units: Tensor, nonzero: Tensor, touched: int) -> Tensor | None:
    """Returns the indices of non-zero elements, (nnz,) int64; None if the non-zero units have no zero element.

    Args:
        units: (n,) int64, indices of units (rows or elements).
        nonzero: bool (n, dim), which elements of these units are not zero.
        touched: how many of these units are not zero.
    """
    dim = nonzero.shape[1]
    places = torch.from_numpy(np.flatnonzero(nonzero.numpy()))
    if len(places) == touched * dim:
        return None
    if int(units[-1]) + 1 == len(units):
        return places  # units 0 to n - 1: positions in `nonzero` are indices of the tensor
    return places + (units - torch.arange(len(units)))[places // dim] * dim


def _is_full(gradient: Tensor) -> bool:
    """Whether a dense gradient is taken as without zeros: if it is mostly non-zero, small, or not contiguous."""
    if gradient.numel() < FEWEST_SAMPLED or not gradient.is_contiguous():
        return True
    places = Sampling.at_most(LOOKS, gradient.numel()).places(gradient.numel())
    return float((gradient.view(-1)[places.to(gradient.device)] != 0).float().mean()) > MOST_FOUND


Footprints = Mapping[str, Footprint]  # parameter name -> footprint, of one rank in one step


def write_footprints(file: BinaryIO, steps: Sequence[Footprints], **more: Any) -> None:
    """Writes the indices of non-zeros in one rank's gradients, and a JSON text, to an .npz file that needs no pickle.

    Args:
        steps: for every training step, indices of non-zero rows and elements by parameter name.
        more: further entries of the JSON text.
    """
    arrays: dict[str, Any] = {}
    listed: list[list[dict[str, Any]]] = []
    for step, footprints in enumerate(steps):
        listed.append([])
        for number, (name, f) in enumerate(footprints.items()):
            arrays[f"units.{step}.{number}"] = f.units.numpy()
            if f.elements is not None:
                arrays[f"elements.{step}.{number}"] = f.elements.numpy()
            about = {"name": name, "shape": f.shape.shape, "sampling": f.sampling.step}
            listed[-1].append({**about, "sparse": f.sparse, "full": f.full})
    np.savez(file, footprints=np.array(json.dumps({"version": VERSION, "steps": listed, **more})), **arrays)


def read_footprints(file: BinaryIO) -> tuple[list[dict[str, Footprint]], dict[str, Any]]:
    """Reads a file of `write_footprints`; returns indices of non-zeros by step and name, and the other JSON entries.

    Raises:
        ValueError: for another kind of file, or another version.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if any(part.compress_type != zipfile.ZIP_STORED for part in arrays.zip.infolist()):
                raise ValueError("it is compressed, and could be of any size")
            more = from_json(str(arrays["footprints"]), "recording")
            if more.pop("version") != VERSION:
                raise ValueError(f"expected version {VERSION}")
            listed = more.pop("steps")
            steps = [
                {about["name"]: _read(arrays, f"{step}.{number}", about) for number, about in enumerate(of_step)}
                for step, of_step in enumerate(listed)
            ]
    except (KeyError, TypeError, AttributeError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a recording of footprints: {error}") from None
    return steps, more


def _read(arrays: Any, key: str, about: Mapping[str, Any]) -> Footprint:
    shape = Shape(tuple(int(n) for n in about["shape"]))
    units = _checked(arrays[f"units.{key}"], shape.units)
    elements = _checked(arrays[f"elements.{key}"], shape.numel) if f"elements.{key}" in arrays else None
    sampling = Sampling(int(about["sampling"]))
    return Footprint(shape, sampling, units, elements, bool(about["sparse"]), bool(about["full"]))


def _checked(array: np.ndarray[Any, Any], size: int) -> Tensor:
    """Converts indices from an untrusted file; raises ValueError unless they are (n,) int64, ascending in [0, size)."""
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError(f"indices must be int64 (n,), got {array.dtype} {array.shape}")
    if len(array) and (array[0] < 0 or array[-1] >= size or (np.diff(array) <= 0).any()):
        raise ValueError(f"indices must ascend within [0, {size})")
    return torch.from_numpy(array)


def footprints_to_bytes(steps: Sequence[Footprints]) -> bytes:
    """Returns the indices of non-zeros in a rank's gradients, by step and parameter name, as bytes for other ranks."""
    file = io.BytesIO()
    write_footprints(file, steps)
    return file.getvalue()


def footprints_from_bytes(content: bytes) -> list[dict[str, Footprint]]:
    """Returns the indices of non-zeros in gradients, by step and parameter name, from `footprints_to_bytes`' bytes."""
    return read_footprints(io.BytesIO(content))[0]
