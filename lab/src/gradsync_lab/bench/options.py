"""Parses workload options `NAME=VALUE` of a command line, by the types that the workload declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .. import workloads
from ..workloads import Workload


def parse_options(
    names: Sequence[str], texts: Iterable[str], kind_of: Callable[[str], type[Workload]] = workloads.kind_of
) -> dict[str, Any]:
    """Parses `texts`, such as `dim=32`, to options for all workloads in `names`, without opening their data.

    Raises:
        ValueError: a workload is unknown, a text has another form, an option is given twice or is missing in some
            workload, or a value has another type or is out of range; the message lists all options of these workloads.
    """
    kinds = [kind_of(name) for name in names]
    try:
        options = _values(kinds, texts)
        for kind in kinds:
            kind(**options)
    except ValueError as error:
        raise ValueError(f"{error}. {options_in_words(kinds)}") from None
    return options


def options_in_words(kinds: Iterable[type[Workload]]) -> str:
    """Returns `Options of lstm: batch_size (int, 32), ...; of deepfm: ...`: types and defaults."""
    listed = []
    for kind in dict.fromkeys(kinds):
        declared = workloads.declared_options(kind).items()
        words = ", ".join(f"{name} ({option.type_name}, {option.default})" for name, option in declared)
        listed.append(f"of {kind.name}: {words}")
    return f"Options {'; '.join(listed)}"


def _values(kinds: Sequence[type[Workload]], texts: Iterable[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals):
            raise ValueError(f"an option must look like NAME=VALUE, got {text!r}")
        if name in options:
            raise ValueError(f"option {name!r} is given twice")
        for kind in kinds:
            options[name] = _value(kind, name, value)
    return options


def _value(kind: type[Workload], name: str, text: str) -> Any:
    declared = workloads.declared_options(kind)
    if name not in declared:
        raise ValueError(f"workload {kind.name!r} has no option {name!r}")
    try:
        return TypeAdapter(declared[name].type).validate_python(text)
    except ValidationError:
        raise ValueError(f"option {name!r} of {kind.name!r} must be {declared[name].type_name}, got {text!r}") from None
