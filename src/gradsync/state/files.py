"""Safetensors files, without pickle, of nested dicts of tensors, numbers and text.

The file holds tensors as they are, and everything else as JSON in its header, which names each tensor by its path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..inputs.files import from_json, regular_file

ENTRY = "gradsync"  # the key in the header's metadata
TENSOR, BYTES, DICT = "tensor", "bytes", "dict"  # the only key of a dict in the header that stands for such a value
BETWEEN = "/"  # the separator of names in a path
DAMAGE = (KeyError, TypeError, ValueError, RecursionError)  # errors that a damaged header raises


def save_file(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes `handle.state_dict()` or `handle.checkpoint().state_dict()` to a safetensors file, which it overwrites.

    `handle` is what `gradsync.attach` returned on this rank.

    Raises:
        TypeError: for a state that holds anything else than dicts, lists, tensors, bytes, numbers, text and None.

    Example:
        >>> gradsync.state.save_file(handle.state_dict(), f"state.{rank}.safetensors")  # doctest: +SKIP
    """
    from safetensors.torch import save_file as write

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, (), tensors))
    write(tensors, path, {ENTRY: text})


def load_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the state in a file that `save_file` wrote, with tensors on the CPU.

    Raises:
        TypeError: if `path` is no path.
        ValueError: for a file that cannot be read, or that `save_file` did not write.
    """
    from safetensors import SafetensorError, safe_open

    place = regular_file(path, "state")
    try:
        with safe_open(place, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # it is no dict
            return _state((file.metadata() or {})[ENTRY], tensors)
    except (SafetensorError, OSError, *DAMAGE) as error:
        raise ValueError(f"{os.fspath(path)!r} is no file that gradsync.state.save_file wrote: {error!r}") from None


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """Returns the state of a rank as bytes, which are the contents of the file that `save_file` would write.

    Raises:
        TypeError: for a state that holds anything else than dicts, lists, tensors, bytes, numbers, text and None.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, (), tensors))
    content: bytes = save(tensors, {ENTRY: text})
    return content


def from_bytes(content: bytes) -> dict[str, Any]:
    """Returns the state that `to_bytes` turned into these bytes, or that `save_file` wrote, with tensors on the CPU.

    Raises:
        ValueError: for other bytes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")], "header")
        return _state(header["__metadata__"][ENTRY], tensors)
    except (SafetensorError, *DAMAGE) as error:
        raise ValueError(f"these {len(content)} bytes are not what gradsync.state.to_bytes made: {error!r}") from None


def _state(text: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    found = _unpacked(from_json(text, "header", any_number=True), tensors)
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__}, no dict")
    return found


def _packed(value: object, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """Returns the value as JSON data that names tensors by path; adds the tensors to `tensors`, by path."""
    if isinstance(value, Tensor | bytes):
        name = BETWEEN.join(path)
        if name in tensors:
            raise TypeError(f"two tensors of the state have the path {name!r}")
        tensors[name] = _as_tensor(value) if isinstance(value, bytes) else value.detach().contiguous()
        return {BYTES if isinstance(value, bytes) else TENSOR: name}
    if isinstance(value, Mapping):
        if (other := next((key for key in value if not isinstance(key, str)), None)) is not None:
            raise TypeError(f"keys of a state must be text, got {other!r}")
        packed = {key: _packed(each, (*path, key), tensors) for key, each in value.items()}
        return {DICT: packed} if packed.keys() in ({TENSOR}, {BYTES}, {DICT}) else packed
    if isinstance(value, list | tuple):
        return [_packed(each, (*path, str(number)), tensors) for number, each in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the state's {BETWEEN.join(path)!r} is a {type(value).__name__}, which safetensors cannot hold")


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {DICT} and isinstance(value[DICT], dict):
        value = value[DICT]
    elif value.keys() == {TENSOR} and isinstance(value[TENSOR], str):
        return tensors[value[TENSOR]]
    elif value.keys() == {BYTES} and isinstance(value[BYTES], str):
        return tensors[value[BYTES]].numpy().tobytes()
    return {key: _unpacked(each, tensors) for key, each in value.items()}


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
