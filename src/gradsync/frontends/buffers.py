"""Buffers of an attached model: rank 0's are broadcast before each forward in training mode, as with DDP."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # a class of torch that its stub lacks

from ..comm import Group, broadcast_tensors, dense_parts, gather_bytes
from ..engine.engine import Engine
from ..tensors.bucket import TensorSpec, matches
from .torch_hooks import outside_of_transforms

REMEDY = "exclude=[{name!r}] leaves this one alone, broadcast_buffers=False all buffers"
Send = Callable[[Group, list[Tensor], float], None]


class Buffers:
    """Broadcasts a model's buffers from rank 0; buffers may be added, removed or replaced between calls.

    Only values are sent while names, shapes and dtypes stay as they are. When these change, ranks first compare them
    while all wait for each other, so that no rank reads a message of another size. A model without buffers at attach is
    left alone for good, as with DDP.

    Args:
        model: the model, held weakly.
        engine: runs the broadcasts.
        exclude: names or shell patterns of buffers that are left alone.
        is_active: False leaves all buffers alone.
    """

    def __init__(self, model: nn.Module, engine: Engine, exclude: Sequence[str], *, is_active: bool = True) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._exclude = exclude
        self._is_excluded: dict[str, bool] = {}
        self._tables: list[tuple[str, Mapping[str, Tensor | None]]] = []  # name and buffers of each module
        self._modules: list[weakref.ref[nn.Module]] = []  # modules with buffers
        self._generation = -1  # the generation of modules (see `present`) that the tables belong to
        self._specs: list[tuple[Any, ...]] = []  # specs of the buffers, equal on all ranks
        self._is_active = is_active and engine.group.size > 1
        if self._is_active:
            self._specs = [_spec(name, buffer) for name, buffer in self.present().items()]
            self._is_active = bool(self._specs)

    def are_in_training(self) -> bool:
        """Whether a module with buffers is in training mode, even if the whole model is in evaluation mode."""
        modules = (ref() for ref in self._modules)
        return any(module.training for module in modules if module is not None)

    def present(self, generation: int = 0) -> dict[str, Tensor]:
        """Returns the buffers to broadcast (those not excluded), by name, each once; they have any shape and dtype.

        Args:
            generation: a number that changes whenever modules have changed (`Changes.generation`); the model is then
                searched for buffers anew.
        """
        if generation != self._generation:
            self._find_tables()
            self._generation = generation
        found: dict[int, tuple[str, Tensor]] = {}
        for module, buffers in self._tables:
            if not buffers:
                continue
            for key, buffer in buffers.items():
                if buffer is None or id(buffer) in found:
                    continue
                name = f"{module}.{key}" if module else key
                if not self._exclude or not self._excludes(name):
                    found[id(buffer)] = (name, buffer)
        return dict(found.values())

    def broadcast(self, generation: int = 0, send: Send = broadcast_tensors) -> None:
        """Overwrites this rank's buffers with rank 0's. Collective.

        Version counters stay, as with DDP: to autograd, tensors that an earlier forward saved have not changed.

        Args:
            generation: a number that changes whenever modules have changed (`Changes.generation`).
            send: the function that broadcasts tensors (group, tensors, seconds to wait at most), such as
                `broadcast_tensors`.

        Raises:
            ValueError, GroupError: if buffers changed on some ranks only, or differently.
        """
        if not self._is_active:
            return
        with outside_of_transforms() as is_transformed:
            buffers = self.present(generation)
            if is_transformed:
                buffers = {n: b for n, b in buffers.items() if not torch._C._functorch.is_functorch_wrapped_tensor(b)}
            specs = [_spec(name, buffer) for name, buffer in buffers.items()]
            if specs != self._specs:
                self._agree(buffers, specs)
            if not buffers:
                return
            timeout_s, tensors = self._engine.timeout_s, list(buffers.values())
            writes = self._engine.group.rank != 0 or send is not broadcast_tensors
            self._engine.peers.call(
                "broadcast of buffers",
                lambda group: _keeping_versions(tensors if writes else [], lambda: send(group, tensors, timeout_s)),
            )

    def _excludes(self, name: str) -> bool:
        found = self._is_excluded.get(name)
        if found is None:
            found = self._is_excluded[name] = matches(name, self._exclude)
        return found

    def _find_tables(self) -> None:
        """Records each module's own dict of buffers, as modules may replace buffers; walking all modules is slow."""
        model = self._model()
        modules = [] if model is None else list(model.named_modules())
        self._tables = [(name, module._buffers) for name, module in modules]
        self._modules = [weakref.ref(module) for _, module in modules if module._buffers]

    def _agree(self, buffers: Mapping[str, Tensor], specs: list[tuple[Any, ...]]) -> None:
        """Accepts buffers that changed on this rank if all ranks changed alike, else raises."""
        for name, buffer in buffers.items():
            if why := why_not_broadcast(name, buffer):
                self._engine.peers.fail(why)
                raise ValueError(why)
        now, before = _lines(specs), _lines(self._specs)
        was, is_now = next((b, n) for b, n in zip_longest(before, now, fillvalue="") if b != n)
        self._engine.peers.call(
            "buffers that changed", lambda group: _require_alike(group, was, is_now, now, self._engine)
        )
        self._specs = specs


def why_not_broadcast(name: str, buffer: Tensor) -> str:
    """Returns why a buffer (any shape and dtype) cannot be broadcast and what to do; "" if it can be."""
    kind = ""
    if isinstance(buffer, UninitializedTensorMixin):
        kind = "is not initialised yet: run a forward on every rank before attach(), or"
    elif buffer.is_meta:
        kind = "is on the meta device and has no values: to_empty(device=...) and fill it before attach(), or"
    elif type(buffer).__name__ == "DTensor":
        kind = "is a DTensor:"
    elif buffer.is_quantized or buffer.is_nested or str(buffer.layout) == "torch._mkldnn":
        layout = "nested" if buffer.is_nested else buffer.dtype if buffer.is_quantized else buffer.layout
        kind = f"is a tensor of a kind that is not broadcast ({layout}):"
    return f"the buffer {name!r} {kind} {REMEDY.format(name=name)}" if kind else ""


def why_not_averaged(name: str, buffer: Tensor) -> str:
    """Returns why a buffer (any shape and dtype) cannot be averaged over ranks and what to do; "" if it can be.

    Complex buffers, which are left alone, pass.
    """
    if (why := why_not_broadcast(name, buffer)) or buffer.is_complex():
        return why
    kind = ""
    if buffer.layout is not torch.strided:
        kind = f"is sparse ({buffer.layout}), which a plan of parameters cannot average: register it dense, or"
    elif buffer.is_floating_point() and buffer.itemsize < 2:
        kind = f"is of {buffer.dtype}, which a plan of parameters cannot average: register it in 16 bits or more, or"
    elif buffer.numel() and (0, True) in zip(buffer.stride(), (size > 1 for size in buffer.shape), strict=True):
        kind = "has elements that share memory (expand), which cannot be averaged one by one: clone() it, or"
    return f"the buffer {name!r} {kind} {REMEDY.format(name=name)}" if kind else ""


def describe_buffers(buffers: Mapping[str, Tensor]) -> list[str]:
    """Returns one line per buffer, `name: shape dtype`, and for a sparse one its number of stored elements.

    Ranks compare these lines.
    """
    return _lines([_spec(name, buffer) for name, buffer in buffers.items()])


def _spec(name: str, buffer: Tensor) -> tuple[Any, ...]:
    """Returns the buffer's name, shape, dtype and, if sparse, layout and sizes, which all ranks must have alike."""
    if buffer.layout is torch.strided:
        return name, buffer.shape, buffer.dtype
    return name, buffer.shape, buffer.dtype, buffer.layout, *(part.shape for part in dense_parts(buffer))


def _lines(specs: Sequence[tuple[Any, ...]]) -> list[str]:
    return [_line(*spec) for spec in specs]


def _line(
    name: str, shape: torch.Size, dtype: torch.dtype, layout: torch.layout = torch.strided, *parts: torch.Size
) -> str:
    sparse = "" if layout is torch.strided else f" {layout} of {parts[-1][0]} elements".replace("torch.", "")
    return f"{name}: {TensorSpec(tuple(shape), dtype)}{sparse}"


def _require_alike(group: Group, was: str, is_now: str, lines: list[str], engine: Engine) -> None:
    """Raises unless all ranks' descriptions `lines` are equal; the first change on this rank is `was` to `is_now`."""
    remedy = REMEDY.format(name=(is_now or was).partition(":")[0])
    text = "\n".join(lines)
    change = f"{was or 'nothing'!r} became {is_now or 'nothing'!r}"
    detail = f"{change}; if not on all ranks, {remedy}"
    group.barrier("a comparison of buffers", engine.timeout_s, detail=detail)
    if len(set(gather_bytes(group, hashlib.sha256(text.encode()).digest(), engine.timeout_s))) == 1:
        return
    texts = [found.decode().split("\n") for found in gather_bytes(group, text.encode() or b" ", engine.timeout_s)]
    rank = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
    first, other = (dict(line.rpartition(": ")[::2] for line in texts[r] if line.strip()) for r in (0, rank))
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    raise ValueError(
        f"the buffer {name!r} is {first.get(name, 'not there')} on rank 0 and {other.get(name, 'not there')} on rank "
        f"{rank}, so rank 0's buffers cannot be given to all; {REMEDY.format(name=name)}"
    )


def _keeping_versions(tensors: list[Tensor], write: Callable[[], None]) -> None:
    """Runs `write` without a trace for autograd: the tensors' version counters stay as they were."""
    with _unsafe_preserve_version_counter(tuple(tensors)) if tensors else nullcontext():
        write()
