"""Files from elsewhere are read within a size, decoded and parsed strictly, with errors that name the file.

JSON is strict where Python's reader is not: a key stands once in an object, numbers are finite, whole numbers fit 64
bits, and nothing is nested deeper than `MOST_DEPTH`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MOST_BYTES = 64 << 20  # of a JSON file: a profile of 10^4 parameters takes about 10 MB
MOST_TOML_BYTES = 1 << 20  # TOML is parsed 100 times slower
MOST_DEPTH = 64  # of JSON: schemes in schemes take about 10 levels
IRREPLACEABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV}  # only in place, if at all
WHOLE = range(-(1 << 63), 1 << 64)  # whole numbers of 64 bits, with a sign or without


def regular_file(path: str | os.PathLike[str], noun: str) -> Path:
    """Returns the path of a file that can be opened without waiting: no folder, pipe or device.

    `noun` says in errors what the file should hold, such as "plan".

    Raises:
        TypeError: if `path` is no path.
        ValueError: naming the path, if there is no such file, it is not a regular one, or cannot be read.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a {noun} is read from a path, got {path!r}")
    place = Path(path)
    with naming(place):
        try:
            if not place.exists():
                raise ValueError(f"there is no such file; expected a {noun}")
            if not place.is_file():
                raise ValueError(
                    f"it is a {'folder' if place.is_dir() else 'pipe or device'}; expected a {noun}'s file"
                )
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from None
    return place


def read_text(path: str | os.PathLike[str], noun: str, most_bytes: int = MOST_BYTES) -> str:
    """Returns the text of a UTF-8 file of at most `most_bytes`; no more than that is read.

    `noun` says in errors what the file should hold, such as "plan".

    Raises:
        TypeError: if `path` is no path.
        ValueError: naming the path, if there is no such file, it is not a regular one, cannot be read, is longer, or
            not UTF-8.
    """
    place = regular_file(path, noun)
    with naming(place):
        try:
            with place.open("rb") as file:
                content = file.read(most_bytes + 1)
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from None
        if len(content) > most_bytes:
            raise ValueError(f"it is larger than {most_bytes} bytes, the most that a {noun} may have")
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"0x{content[error.start]:02x} at byte {error.start}"
            raise ValueError(f"it is not UTF-8 text ({found}); expected a {noun}") from None


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file, by way of another one beside it, so that readers see the old text or the new one.

    A device or a pipe is written to as it is, and so is a file that may be written and not be replaced: a mount, or in
    a folder that may not be written to.

    Raises:
        OSError: if it cannot be written; a file that is there is kept where that is for another reason, as a full disk.
    """
    named = Path(path)
    if named.exists() and not named.is_file():
        named.write_text(text, encoding="utf-8")
        return
    place = named.resolve()
    part = place.with_name(f".{place.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(place)
    except OSError as error:
        if error.errno not in IRREPLACEABLE or not place.is_file():
            raise
        place.write_text(text, encoding="utf-8")
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the path in front of the text of a ValueError inside a `with`, unless it stands there."""
    try:
        yield
    except ValueError as error:
        where = f"{os.fspath(path)}: "
        text = str(error)
        raise ValueError(text if text.startswith(where) else where + text) from None


def from_json(text: str | bytes, noun: str, *, any_number: bool = False) -> Any:
    """Returns the data that a JSON text describes; `noun` says in errors what it is, such as "plan".

    `any_number`: numbers need be neither finite nor within 64 bits.

    Raises:
        ValueError: for text that is not JSON, a key that an object has twice, a number that is not finite, a whole
            number of more than 64 bits, or deeper nesting than `MOST_DEPTH`.
    """
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"the {noun} is nested too deep to be read") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the {noun} is no JSON: {error}") from None
    except ValueError as error:  # of `_once`, or a whole number with too many digits for Python
        raise ValueError(f"the {noun} cannot be read: {error}") from None
    _require_plain(data, noun, any_number)
    return data


def from_toml(text: str, noun: str) -> dict[str, Any]:
    """Returns the table that a TOML text describes, as a dict; `noun` says in errors what it is, such as "cluster".

    Raises:
        ValueError: for text that is not TOML, a number that is not finite, a whole number of more than 64 bits, or
            deeper nesting than `MOST_DEPTH`.
    """
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"the {noun} is nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"the {noun} is no TOML: {error}") from None
    _require_plain(data, noun)
    return data


def read_as(read: Callable[[str], T], data: Any, noun: str) -> T:
    """Converts parsed JSON or TOML to an object by a pydantic reader of JSON text, such as `Model.model_validate_json`.

    It goes by JSON text, since a strict reader takes a list for a tuple only there. `noun` says in errors what the data
    is.

    Raises:
        ValueError: for the first field that does not fit, with its path.
    """
    from pydantic import ValidationError

    try:
        return read(json.dumps(data))
    except RecursionError:
        raise ValueError(f"the {noun} is nested too deep to be read") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or noun
        raise ValueError(f"{noun}, field {where}: {first['msg']} (got {str(first['input'])[:80]})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs of a JSON object as a dict.

    Raises:
        ValueError: for a key that stands there twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"an object has the key {key[:80]!r} twice")
        found[key] = value
    return found


def _require_plain(data: Any, noun: str, any_number: bool = False) -> None:
    """Checks depth and numbers, level by level.

    Raises:
        ValueError: as `from_json`, naming the field.
    """
    level, depth = [data], 0
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif not any_number and (text := _misfit(each)):
                raise ValueError(f"{noun}, field {_place_of(each, data) or noun}: {text}")
        level, depth = below, depth + 1
        if depth == MOST_DEPTH and any(isinstance(each, dict | list) for each in level):
            raise ValueError(f"the {noun} is nested too deep to be read: at most {MOST_DEPTH} levels")


def _misfit(leaf: Any) -> str:
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return f"a number must be finite, got {leaf}"
    if isinstance(leaf, int) and leaf not in WHOLE:
        return f"a whole number must fit 64 bits, got {str(leaf)[:40]}"
    return ""


def _place_of(leaf: Any, data: Any) -> str | None:
    """Returns the path of this very object in the data, as `buckets.0.id`; None if it is not there."""
    if data is leaf:
        return ""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, each in inside:
        if (place := _place_of(leaf, each)) is not None:
            return f"{key}.{place}" if place else str(key)
    return None
