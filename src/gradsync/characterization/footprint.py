"""Which rows and elements of one gradient are not zero: what figures of sparsity are made from, without the values.

A footprint may be a sample: of every `step` neighbouring rows (elements, where there are no rows) the one that a hash
names, the same on all ranks. So densities, overlaps and unions are estimated without bias from few rows, and hot
regions are in the sample for what they are in the tensor.
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
from ..kernels.reference.rotated import rotation
from ..tensors.density import FEWEST_SAMPLED, MOST_FOUND
from ..tensors.sparse import SparseRows

Gradient = Tensor | SparseRows | None  # None: this rank did not use the parameter

DEFAULT_SAMPLE = 1 << 15  # rows; of 1 % density, within 5.5 % of it a step (one standard error)
LOOKS = 1024  # elements of a dense gradient that tell whether it is worth a sample
VERSION = 1


@dataclass(frozen=True)
class Shape:
    """Of a gradient, as rows of `dim` elements. What is no matrix or table has no rows, but elements only."""

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
        """Elements of a unit: of a row, or 1."""
        return int(torch.Size(self.shape[1:]).numel()) if len(self.shape) > 1 else 1

    @property
    def units(self) -> int:
        """What samples are made of: rows, or elements where there are none."""
        return self.shape[0] if len(self.shape) > 1 else self.numel


@dataclass(frozen=True)
class Sampling:
    """Of every `step` neighbouring units one is looked at; `step` is a power of two."""

    step: int = 1

    @classmethod
    def at_most(cls, sample: int | None, units: int) -> Sampling:
        """Of so many units at most `sample` are looked at; None: all of them."""
        step = 1
        while sample is not None and step * sample < units:
            step *= 2
        return cls(step)

    def places(self, units: int) -> Tensor:
        """All units in the sample, ascending, (n,) int64."""
        return torch.arange(units) if self.step == 1 else _places(units, self.step)

    def chosen(self, units: Tensor, of: int) -> Tensor:
        """Where `units` are in the sample of so many: positions, (n,) int64."""
        return _in_sample(of, self.step).to(units.device).index_select(0, units).nonzero().squeeze(1)


SEED = 0x5EED  # of the sample; not that of the owners of rows, which the same hash deals


@lru_cache(maxsize=256)
def _places(units: int, step: int) -> Tensor:
    runs = torch.arange(-(-units // step))
    places = runs * step + rotation(runs, step, SEED)
    return places[places < units]


@lru_cache(maxsize=64)
def _in_sample(units: int, step: int) -> Tensor:
    """One byte a unit: one look-up costs a tenth of hashing each index."""
    mask = torch.zeros(units, dtype=torch.bool)
    mask[_places(units, step)] = True
    return mask


@dataclass(frozen=True)
class Footprint:
    """One rank's gradient of one tensor in one step, in the sampled units.

    `full`: more than half of its elements are not zero, so it was not looked at any further.
    """

    shape: Shape
    sampling: Sampling
    units: Tensor  # sampled units that are not zero, ascending; of a sparse gradient those that it stores
    elements: Tensor | None = None  # elements that are not zero in these, ascending; None: all of them
    sparse: bool = False  # the layout
    full: bool = False

    @classmethod
    def of(cls, gradient: Gradient, shape: Shape, sample: int | None = None) -> Footprint:
        """Looks at a gradient; with a `sample`, dense ones that are small or mostly not zero are taken as full.

        NaN, infinity and subnormals count as not zero, -0.0 as zero.

        Raises:
            ValueError: for indices out of range, or a sparse tensor with another number of sparse dimensions than one.
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
        """(nnz,) int64: the elements that are not zero, ascending."""
        if self.elements is not None:
            return self.elements
        return (self.units[:, None] * self.shape.dim + torch.arange(self.shape.dim)).flatten()


def _of_rows(rows: SparseRows, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """(rows, elements) of a row-sparse gradient; values of repeated rows are summed before they are looked at."""
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
    touched = torch.from_numpy(nonzero.numpy().any(axis=1))  # several times as fast as torch's, as is flatnonzero
    units = places[touched]
    return units, _elements_in(places, nonzero, len(units))


def _elements_in(units: Tensor, nonzero: Tensor, touched: int) -> Tensor | None:
    """Which elements of some units are not zero, bool (units, dim), as indices; None for all of `touched` units."""
    dim = nonzero.shape[1]
    places = torch.from_numpy(np.flatnonzero(nonzero.numpy()))
    if len(places) == touched * dim:
        return None
    if int(units[-1]) + 1 == len(units):
        return places  # the first units, so places among them are elements of the tensor
    return places + (units - torch.arange(len(units)))[places // dim] * dim


def _is_full(gradient: Tensor) -> bool:
    """What is mostly not zero, small, or lies in memory in another order gains nothing from being sparse."""
    if gradient.numel() < FEWEST_SAMPLED or not gradient.is_contiguous():
        return True
    places = Sampling.at_most(LOOKS, gradient.numel()).places(gradient.numel())
    return float((gradient.view(-1)[places.to(gradient.device)] != 0).float().mean()) > MOST_FOUND


Footprints = Mapping[str, Footprint]  # one rank's, of one step, by the tensor's name


def write_footprints(file: BinaryIO, steps: Sequence[Footprints], **more: Any) -> None:
    """One rank's footprints, as arrays and one JSON text in NumPy's .npz: nothing in it can run when it is read."""
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
    """What `write_footprints` wrote: the steps, and what else it was given.

    Raises:
        ValueError: for what is no such file, or of another version.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            more = json.loads(str(arrays["footprints"]))
            if more.pop("version") != VERSION:
                raise ValueError(f"expected version {VERSION}")
            listed = more.pop("steps")
            steps = [
                {about["name"]: _read(arrays, f"{step}.{number}", about) for number, about in enumerate(of_step)}
                for step, of_step in enumerate(listed)
            ]
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a recording of footprints: {error}") from None
    return steps, more


def _read(arrays: Any, key: str, about: Mapping[str, Any]) -> Footprint:
    shape = Shape(tuple(int(n) for n in about["shape"]))
    units = _checked(arrays[f"units.{key}"], shape.units)
    elements = _checked(arrays[f"elements.{key}"], shape.numel) if f"elements.{key}" in arrays else None
    sampling = Sampling(int(about["sampling"]))
    return Footprint(shape, sampling, units, elements, bool(about["sparse"]), bool(about["full"]))


def _checked(array: np.ndarray[Any, Any], size: int) -> Tensor:
    """Indices as they were written, or an error: files come from elsewhere."""
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError(f"indices must be int64 (n,), got {array.dtype} {array.shape}")
    if len(array) and (array[0] < 0 or array[-1] >= size or (np.diff(array) <= 0).any()):
        raise ValueError(f"indices must ascend within [0, {size})")
    return torch.from_numpy(array)


def footprints_to_bytes(steps: Sequence[Footprints]) -> bytes:
    """For other ranks."""
    file = io.BytesIO()
    write_footprints(file, steps)
    return file.getvalue()


def footprints_from_bytes(content: bytes) -> list[dict[str, Footprint]]:
    """The inverse of `footprints_to_bytes`."""
    return read_footprints(io.BytesIO(content))[0]
