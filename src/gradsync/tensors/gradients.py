"""The memory of a bucket, which takes gradients and gives synchronised ones: two classes with one interface.

`FlatGradients` keeps dense gradients in one tensor, so that a parameter's gradient can *live* there as a view and
nothing is copied. `RowGradients` holds sparse ones. Neither touches `param.grad`: `gradient_views.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from itertools import accumulate
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from .bucket import NO_MARKS, NUM_MARKS, ROUND_BITS, Bucket, Layout, Segment, StepMarks
from .scaling import multiply
from .sparse import SparseRows

MOST_KNOWN_FLAGS = 64  # tensors of flags, of a few bytes each, that a bucket keeps


class _Memory(NamedTuple):
    """The memory of a flat bucket, and what lies in it.

    `own_references` is the number of references to the storage from here.
    """

    flat: Tensor  # (elements and flags,)
    parts: dict[str, list[tuple[Segment, Tensor]]]  # by parameter: its slices of `flat`
    views: dict[str, Tensor]  # by parameter, with its shape, where its elements lie in the order of its own memory
    storage: torch.UntypedStorage
    own_references: int


class FlatGradients:
    """The memory of a flat bucket: `flat` has the elements of all its parameters one after the other, then the flags.

    Flags are numbers to be summed over ranks: which parameters a rank used, if a value is not finite, and `StepMarks`.
    A parameter's elements lie in the order of its own memory (channels-last, say), so that its gradient can live here.
    With `in_order`, and for a parameter that the plan cut, they lie in the order of their indices. Memory is allocated
    when it is first asked for.

    Attributes:
        factor: multiplies gradients as they are loaded, but not flags; 1: they stay as they are.
        flags: the flags, (bucket.num_flags,), at the end of `flat`; after `release` a copy of them.
    """

    def __init__(
        self, bucket: Bucket, templates: Mapping[str, Tensor], device: torch.device, *, in_order: bool = False
    ) -> None:
        self.bucket = bucket
        self._device = device
        self.factor = 1.0
        self._loaded: set[str] = set()
        # The strides that optimisers expect of a gradient: the parameter's own.
        self._shapes = {name: templates[name].shape for name in bucket.names}
        self._strides = {name: torch.empty_like(templates[name], device="meta").stride() for name in bucket.names}
        whole = {s.name for s in bucket.segments if s.numel == templates[s.name].numel()}
        self._with_view = {name for name in whole if not in_order or templates[name].is_contiguous()}
        self._known_flags: dict[tuple[float, ...], Tensor] = {}
        stops = list(accumulate(segment.numel for segment in bucket.segments))
        self._places = list(zip(bucket.names, [0, *stops[:-1]], stops, strict=True))  # in memory: (name, start, stop)
        self.flags = torch.zeros(bucket.num_flags, dtype=bucket.dtype, device=device)

    def release(self) -> None:
        """Leaves the memory to the tensors outside of this object that lie in it, such as parameters' gradients."""
        self.flags = self.flags.clone()
        self.__dict__.pop("_memory", None)

    def renew(self) -> None:
        """Allocates new memory, of uninitialised gradients, and leaves the old memory to the tensors that lie in it."""
        self._memory = self._allocated()

    @cached_property
    def _memory(self) -> _Memory:
        return self._allocated()

    def _allocated(self) -> _Memory:
        """Returns new memory, whose end is `flags` from now on."""
        bucket = self.bucket
        flat = torch.empty(bucket.numel + bucket.num_flags, dtype=bucket.dtype, device=self._device)
        self.flags = flat[bucket.numel :].zero_()
        parts: dict[str, list[tuple[Segment, Tensor]]] = {}
        views: dict[str, Tensor] = {}
        for segment, (name, start, stop) in zip(bucket.segments, self._places, strict=True):
            part = flat[start:stop]
            parts.setdefault(name, []).append((segment, part))
            if name in self._with_view:
                views[name] = part.as_strided(self._shapes[name], self._strides[name], part.storage_offset())
        storage = flat.untyped_storage()
        return _Memory(flat, parts, views, storage, torch._C._storage_Use_Count(storage._cdata))

    @property
    def flat(self) -> Tensor:
        """The bucket's memory: gradients and flags, (bucket.numel + bucket.num_flags,)."""
        return self._memory.flat

    @property
    def references(self) -> int:
        """The number of tensors outside of this object that lie in its memory, such as parameters' gradients."""
        memory = self._memory
        return torch._C._storage_Use_Count(memory.storage._cdata) - memory.own_references

    @property
    def values(self) -> Tensor:
        """A view of the bucket's gradients, (bucket.numel,), without the flags that lie behind them in memory."""
        return self._memory.flat[: self.bucket.numel]

    def view(self, name: str) -> Tensor | None:
        """Returns the view of the bucket in which the parameter's gradient may live, with the parameter's shape.

        None if the plan cut the parameter, or if the elements lie here in another order than in the parameter's memory.
        """
        return self._memory.views.get(name)

    def begin(self, factor: float = 1.0) -> None:
        """Begins a training step, in which no parameter counts as used yet.

        `factor` multiplies the gradients that are loaded in this step, as 1 / ranks for a mean.
        """
        self.factor = factor
        self._loaded.clear()

    def add(self, addend: Tensor) -> None:
        """Adds `addend`, (bucket.numel,) in index order, to the bucket's gradients, however these lie in memory."""
        offset = 0
        for segment in self.bucket.segments:
            part = addend[offset : offset + segment.numel].to(self._memory.flat.device)
            view = self._memory.views.get(segment.name)
            if view is not None:
                view += part.view(view.shape)
            else:
                self._memory.flat[offset : offset + segment.numel] += part
            offset += segment.numel

    def clear(self) -> None:
        """Sets all gradients and flags to zero."""
        self._memory.flat.zero_()

    def load(self, name: str, gradient: Tensor | None, *, used: bool = True) -> None:
        """Copies a parameter's gradient, times `factor`, into the bucket; multiplies it in place if it is `view(name)`.

        Args:
            name: the parameter.
            gradient: with the parameter's shape and dtype, dense or sparse COO; None: zero.
            used: whether this step produced the gradient.
        """
        if used:
            self._loaded.add(name)
        view = self._memory.views.get(name)
        if gradient is None:
            for _, part in self._memory.parts[name]:
                part.zero_()
        elif gradient is view:
            if self.factor != 1:
                view.mul_(self.factor)
        else:
            dense = gradient.detach()  # of create_graph=True, DDP's hook gets gradients in a graph
            if dense.layout is torch.sparse_coo:
                dense = dense_of(dense)
            if view is not None:
                self._copy(view, dense)
                return
            flat = dense.reshape(-1)
            for segment, part in self._memory.parts[name]:
                self._copy(part, flat[segment.start : segment.stop])

    def _copy(self, room: Tensor, values: Tensor) -> None:
        if self.factor == 1:
            room.copy_(values)
        else:
            torch.mul(values.to(room.device), self.factor, out=room)  # plans of parameters have buffers of the host

    def load_views(self, names: Sequence[str]) -> None:
        """Records that this step used these parameters, and that their gradients lie in their views (`view(name)`).

        The gradients are multiplied by `factor` in place. Each name is given once.
        """
        self._loaded.update(names)
        if self.factor != 1:
            multiply([self._memory.flat[start:stop] for start, stop in self._ranges(set(names))], self.factor)

    def _ranges(self, names: Set[str]) -> list[tuple[int, int]]:
        """Returns the ranges of `flat` in which these parameters' gradients lie; neighbours share a range."""
        found: list[tuple[int, int]] = []
        for name, start, stop in self._places:
            if name in names:
                first = found.pop()[0] if found and found[-1][1] == start else start
                found.append((first, stop))
        return found

    def take(self, *, check_finite: bool, marks: StepMarks = NO_MARKS) -> Tensor:
        """Sets this rank's flags and returns the gradients for the scheme to sum, (bucket.numel,).

        If `bucket.flags_ride`, the scheme sums the flags too: it gets `flat`, (bucket.numel + bucket.num_flags,).

        Args:
            check_finite: whether to look for NaN and infinity; one of the flags tells.
            marks: whether this rank is late, and its number of optimiser steps, for flags that reveal ranks out of
                step.
        """
        loaded = [float(segment.name in self._loaded) for segment in self.bucket.segments]
        self.flags.copy_(self._flags_of((*loaded, 0.0, *marks.flags)))
        if check_finite:
            self.flags[-1 - NUM_MARKS] = ~is_finite(self.values)
        return self._memory.flat if self.bucket.flags_ride else self.values

    def _flags_of(self, flags: tuple[float, ...]) -> Tensor:
        """Returns the flags as a tensor on the bucket's device, where the usual ones are from an earlier step."""
        if flags not in self._known_flags:
            if len(self._known_flags) >= MOST_KNOWN_FLAGS:
                self._known_flags.clear()
            made = torch.tensor(flags, dtype=self._memory.flat.dtype)
            self._known_flags[flags] = made.to(self._device, non_blocking=True)  # pageable: staged before this returns
        return self._known_flags[flags]

    def accept(self, result: Tensor) -> None:
        """Copies the scheme's result, of the shape that `take` returned, into the bucket unless it lies there already.

        If `bucket.flags_ride`, the result ends with the summed flags (numbers such as whether a rank used a parameter).
        If not, the caller must have summed `flags` over the ranks before this call.
        """
        target = self._memory.flat if self.bucket.flags_ride else self._memory.flat[: self.bucket.numel]
        if result.data_ptr() != target.data_ptr():
            target.copy_(result)

    def used(self, name: str) -> bool:
        """Whether any rank used the parameter in this step; valid after `accept`."""
        if name in self._loaded:
            return True
        positions = [i for i, segment in enumerate(self.bucket.segments) if segment.name == name]
        return bool(self.flags[positions[0]] > 0)  # a host read, rare: only where this rank did not use the parameter

    def had_non_finite(self) -> Tensor:
        """Returns whether any rank had non-finite values in this step, if `take` checked for them, as a 0-D tensor.

        It is a bool on the bucket's device, and valid after `accept`.
        """
        return self.flags[-1 - NUM_MARKS] > 0

    def fill_nan(self, where: Tensor | None = None) -> None:
        """Sets all synchronised values to NaN; with `where`, a 0-D bool on the bucket's device, only if it is true."""
        values = self._memory.flat[: self.bucket.numel]
        if where is None:
            values.fill_(torch.nan)
        else:
            values.masked_fill_(where, torch.nan)

    def unload(self, name: str, out: Tensor | None, *, shape: torch.Size) -> Tensor:
        """Returns a parameter's synchronised gradient, of shape `shape`: `view(name)` or, where that is None, `out`.

        Only this bucket's elements of `out` are overwritten, as other buckets may hold the rest of the parameter. If
        `out` is None or sparse, a new tensor is returned, whose other elements are uninitialised.
        """
        view = self._memory.views.get(name)
        if view is not None:
            return view
        if out is None or out.layout is not torch.strided:
            out = self._memory.flat.new_empty_strided(shape, self._strides[name])
        flat = out.reshape(-1)  # a view where out is contiguous
        for segment, part in self._memory.parts[name]:
            flat[segment.start : segment.stop] = part
        return out if flat.data_ptr() == out.data_ptr() else out.copy_(flat.view(shape))


class RowGradients:
    """The memory of a bucket of row-sparse tables, which keeps each gradient as loaded until the scheme takes it."""

    factor = 1.0  # what gradients are multiplied by as they are loaded

    def __init__(self, bucket: Bucket, templates: Mapping[str, Tensor], device: torch.device) -> None:
        self.bucket = bucket
        self._shapes = {name: templates[name].shape for name in bucket.names}
        self._strides = {name: torch.empty_like(templates[name], device="meta").stride() for name in bucket.names}
        self._device = device
        self._brought: dict[str, tuple[Tensor, bool]] = {}
        self._taken: dict[str, tuple[int, int]] = {}  # address and version of dense gradients when they were taken
        self._result: dict[str, SparseRows] = {}
        self._check_finite = False
        # The flags ride in no message; a plan without flat buckets sums them apart.
        self.flags = torch.zeros(NUM_MARKS, device=self._device)

    def begin(self, factor: float = 1.0) -> None:
        assert factor == self.factor
        self._brought.clear()
        self._taken.clear()

    def clear(self) -> None:
        """Does nothing: tables hold only gradients that were loaded."""

    def release(self) -> None:
        """Drops the gradients that were loaded, and the rows of the sums."""
        self._brought.clear()
        self._result = {}

    def load(self, name: str, gradient: Tensor | None, *, used: bool = True) -> None:
        if gradient is not None:
            self._brought[name] = (gradient, used)

    def take(self, *, check_finite: bool, marks: StepMarks = NO_MARKS) -> tuple[SparseRows, ...]:
        self._check_finite = check_finite
        self.flags.copy_(torch.tensor(marks.flags), non_blocking=True)
        dense = {name: g for name, (g, _) in self._brought.items() if g.layout is torch.strided}
        self._taken = {name: (gradient.data_ptr(), gradient._version) for name, gradient in dense.items()}
        return tuple(self._table(name) for name in self.bucket.names)

    def accept(self, result: tuple[SparseRows, ...]) -> None:
        self._result = dict(zip(self.bucket.names, result, strict=True))

    def used(self, name: str) -> bool:
        return name in self._result and self._result[name].present

    def had_non_finite(self) -> Tensor:
        """Returns whether the summed tables have non-finite values, as a 0-D bool tensor; the same on every rank.

        False if `take` was not asked to check.
        """
        if not self._check_finite or not self._result:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        return ~torch.stack([is_finite(rows.values) for rows in self._result.values()]).all()

    def table(self, name: str) -> SparseRows:
        """Returns the rows of a table's synchronised gradient."""
        return self._result[name]

    def unload(self, name: str, out: Tensor | None, *, shape: torch.Size) -> Tensor:
        rows = self._result[name]
        if (
            out is None
            or out.layout is not torch.strided
            or not out.is_contiguous()
            or self._taken.get(name) != (out.data_ptr(), out._version)
        ):
            dense = rows.write_to(rows.values.new_zeros(shape))
            strides = self._strides[name]
            return dense if dense.stride() == strides else dense.new_empty_strided(shape, strides).copy_(dense)
        # The rows of the sum are all that this rank brought, and more. Its other zeros become those of all ranks: +0.0.
        return rows.write_to(out.detach().add_(0.0))

    def rows(self, name: str) -> int:
        """Returns the number of distinct rows in this rank's own gradient of the table."""
        return int(torch.unique(self._table(name).indices).numel())

    def union_rows(self, name: str) -> int:
        """Returns the number of distinct rows in the table's gradient summed over all ranks."""
        return self._result[name].nnz

    def first_with_rows_of(self, name: str) -> str:
        """Returns the bucket's first table whose summed gradient has the same rows as this table's, perhaps itself."""
        mine = self._result[name]
        alike = (first for first, rows in self._result.items() if rows.num_rows == mine.num_rows)
        return next(first for first in alike if torch.equal(self._result[first].indices, mine.indices))

    def _table(self, name: str) -> SparseRows:
        if name not in self._brought:
            return SparseRows.absent(self._shapes[name], self.bucket.dtype, self._device)
        gradient, used = self._brought[name]
        is_rows = gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1
        rows = SparseRows.from_torch(gradient) if is_rows else SparseRows.from_dense(dense_of(gradient))
        # Rows kept from an earlier backward count as brought: absent means that no rows are sent.
        return rows if used or rows.nnz else SparseRows.absent(self._shapes[name], self.bucket.dtype, self._device)


def is_finite(values: Tensor) -> Tensor:
    """Returns whether all elements of a floating tensor of any shape are finite, as a 0-D bool on its device."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(torch.aminmax(values)).isfinite().all()  # NaN comes through


def dense_of(gradient: Tensor) -> Tensor:
    """Returns the gradient as a dense tensor of its shape and dtype: itself, or a copy of a sparse COO one.

    Indices are checked first, as torch's `to_dense` would write to any place in memory.

    Raises:
        RuntimeError: for indices outside of the tensor.
    """
    if gradient.layout is not torch.sparse_coo:
        return gradient
    torch._validate_sparse_coo_tensor_args(gradient._indices(), gradient._values(), gradient.shape)
    return gradient.to_dense()


Gradients = FlatGradients | RowGradients


def marks_of_ranks(summed: Sequence[float]) -> tuple[bool, bool]:
    """Returns whether some rank is late, and whether ranks have made different numbers of optimiser steps.

    A late rank takes part only at the optimiser's step, as its backward reached no parameter.

    Args:
        summed: the last `NUM_MARKS` flags (those of `StepMarks`), summed over the ranks.
    """
    late, *bits = [mark > 0 for mark in summed]
    return late, any(map(and_, bits[:ROUND_BITS], bits[ROUND_BITS:]))


def gradients_of(
    bucket: Bucket, templates: Mapping[str, Tensor], device: torch.device, *, in_order: bool = False
) -> Gradients:
    """Returns new memory for a bucket's gradients: `FlatGradients` or `RowGradients`, by the bucket's layout.

    Args:
        bucket: the parameters, or slices of them, that are synchronised together.
        templates: tensors with the shapes and strides of the parameters, by name, on any device, `meta` too.
        device: where the gradients are.
        in_order: keeps elements in the order of their indices, whatever the parameters' memory format.
    """
    if bucket.layout is Layout.FLAT:
        return FlatGradients(bucket, templates, device, in_order=in_order)
    return RowGradients(bucket, templates, device)
