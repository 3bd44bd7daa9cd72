"""Chooses which implementation of a kernel runs: the requested one, or one by device, dtypes and what can be loaded."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from gradsync.kernels import device, native
from gradsync.kernels.checks import PackedPositions

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Literal["native", "triton", "reference", "auto"]

_logger = logging.getLogger("gradsync.kernels")
_requested: Implementation = "auto"
_logged: set[str] = set()  # implementations that the log says are missing


class Kernel(Protocol[P, R]):
    """A kernel as callers see it: a call runs the implementation that `use` chose, or the best for its tensors."""

    reference: Callable[P, R]  # the definition, in torch operations
    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


KERNELS: dict[str, Kernel[..., Any]] = {}  # all functions decorated by `dispatched`, by name


def dispatched(*tensors: str, entries: str | None = None) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Returns a decorator that turns a kernel's definition in torch into a function that runs one of its versions.

    The other versions, in C++ and Triton, have the same name, in the file of the same name in `cpu/` and `triton/`.

    Args:
        tensors: names of the parameters whose tensors (or lists of them, or None) decide by device, dtype and layout.
        entries: name of the parameter with the number of rows or elements that the native version makes a bitmap of:
            an int, or a tensor with this many rows or elements.
    """

    def decorate(definition: Callable[P, R]) -> Kernel[P, R]:
        name, parameters = definition.__name__, list(inspect.signature(definition).parameters)
        deciding = [(parameters.index(parameter), parameter) for parameter in tensors]
        counted = None if entries is None else (parameters.index(entries), entries)

        @functools.wraps(definition)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = len(args)
            found: list[Tensor] = []
            for place, parameter in deciding:
                value = args[place] if place < given else kwargs.get(parameter)
                if isinstance(value, Tensor):
                    found.append(value)
                elif value is not None:
                    found += _tensors_in(value)
            size = 0
            if counted is not None:
                place, parameter = counted
                size = _entries_of(args[place] if place < given else kwargs.get(parameter))
            result: R = pick(name, found, size)(*args, **kwargs)
            return result

        kernel = cast(Kernel[P, R], call)
        kernel.reference = definition
        KERNELS[name] = kernel
        return kernel

    return decorate


def _tensors_in(value: Any) -> list[Tensor]:
    """Returns all tensors in a kernel's argument, also in nested lists; for a `torch.device`, an empty tensor on it."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedPositions):
        return [value.packed]
    if isinstance(value, torch.device):
        return [torch.empty(0, dtype=torch.int32, device=value)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []  # what is wrong, the kernel says


def _entries_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return len(value) if value.ndim > 1 else value.numel()
    return value if isinstance(value, int) else 0  # what is wrong, the kernel says


def use(implementation: Implementation) -> ExitStack:
    """Chooses the implementation of all kernels for the whole process; in a `with` statement, only until its end.

    Raises:
        ImportError: for `native` if it is not built, for `triton` if Triton cannot be imported.
        ValueError: for an unknown name.
    """
    if implementation not in ("native", "triton", "reference", "auto"):
        raise ValueError(f"implementation must be native, triton, reference or auto, got {implementation!r}")
    if implementation == "native":
        native.load()
    if implementation == "triton":
        device.load()
    restore = ExitStack()
    restore.callback(_request, _requested)
    _request(implementation)
    return restore


def active() -> str:
    """Returns the name of the implementation that `use` chose; under `auto`, of the one for tensors on the CPU.

    A call may run another one because of its tensors (see `gradsync.kernels`), or if the kernel lacks this one.
    """
    if _requested != "auto":
        return _requested
    return "reference" if _native() is None else "native"


def _native() -> ModuleType | None:
    """Returns the native kernels; None, with one word in the log, if they are not built."""
    try:
        return native.load()
    except ImportError as error:
        _log_fallback_once("native", error)
        return None


def pick(kernel: str, tensors: Sequence[Tensor], entries: int = 0) -> Callable[..., Any]:
    """Returns the function (torch, C++ or Triton) that runs a kernel for these tensors.

    Args:
        kernel: the kernel's name.
        tensors: the kernel's tensors, in any shapes and dtypes.
        entries: the number of rows or elements that the native version would make a bitmap of.
    """
    requested = _requested
    if requested == "triton" and device.is_present() and all(tensor.is_cpu for tensor in tensors):
        requested = "auto"  # what is offloaded to the host, which Triton cannot read
    if requested == "triton" or (requested == "auto" and device.supports(tensors)):
        return _on_device(kernel)
    if requested == "auto" and (_native() is None or not native.supports(tensors, entries)):
        requested = "reference"
    return KERNELS[kernel].reference if requested == "reference" else version("cpu", kernel)


@functools.cache
def version(package: str, kernel: str) -> Callable[..., Any]:
    """Returns a kernel's function in the package `cpu` or `triton`, or its torch definition if the package lacks it.

    Raises:
        AttributeError: if there is no such kernel.
    """
    if kernel not in KERNELS:
        raise AttributeError(f"gradsync.kernels.{package} has no kernel {kernel!r}")
    definition = KERNELS[kernel].reference
    module = f"gradsync.kernels.{package}.{definition.__module__.rpartition('.')[2]}"
    if importlib.util.find_spec(module) is None:
        return definition
    found: Callable[..., Any] = getattr(importlib.import_module(module), kernel, definition)
    return found


def _on_device(kernel: str) -> Callable[..., Any]:
    """Returns a kernel's Triton function; without Triton, its definition, whose torch operations run on CUDA too."""
    try:
        device.load()
    except ImportError as error:
        _log_fallback_once("triton", error)
        return KERNELS[kernel].reference
    return version("triton", kernel)


def warn_if_slow() -> None:
    """Logs, once a process, that kernels are slow on the CPU, if the native ones are not installed."""
    if not native.is_installed():
        _log_fallback_once("native", native.missing("there is no gradsync.kernels._kernels_base"))


def _request(implementation: Implementation) -> None:
    global _requested  # noqa: PLW0603 (the choice is the whole process's)
    _requested = implementation


def _log_fallback_once(implementation: str, error: ImportError) -> None:
    if implementation not in _logged:
        said = "gradsync is slow here: torch operations run in place of its %s kernels: %s"
        _logger.warning(said, implementation, error)
    _logged.add(implementation)
