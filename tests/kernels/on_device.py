"""CUDA kernels for tests with tensors on the CPU: interpreted there, or copied to a GPU and back."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.kernels import PackedPositions, cpu, device, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton interprets: conftest.py


class OnDevice:
    """A wrapper of `gradsync.kernels.triton`, or of an object that its functions return, for tensors on the CPU."""

    def __init__(self, target: object = None) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._target or device.load(), name)
        return partial(there_and_back, found) if callable(found) else found


def there_and_back(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with on_device() as moved:
        return returned(function(*map(moved, arguments), **{name: moved(value) for name, value in options.items()}))


@contextmanager
def on_device() -> Iterator[Callable[[Any], Any]]:
    """Yields a function that moves arguments to the device; on exit, also after an error, results are copied back."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(moved, value))
        if isinstance(value, Tensor):
            pairs.append((value, value.to(DEVICE)))
            return pairs[-1][1]
        if isinstance(value, PackedPositions):
            return dataclasses.replace(value, packed=moved(value.packed))
        return value

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, which interprets, at an overflow to infinity
            yield moved
    finally:
        for here, there in pairs:
            if here is not there and 0 not in here.stride():
                here.copy_(there)


def returned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(map(returned, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: returned(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value if value is None or isinstance(value, int) else OnDevice(value)


TRITON = OnDevice()
every = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(cpu, id="native"),
        pytest.param(reference, id="reference"),
        pytest.param(TRITON, id="triton", marks=pytest.mark.interpreted),
    ],
)
