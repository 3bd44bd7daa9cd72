"""Expressions: how a plan names what it is made of, as trees `{"name": {"field": value}}` of registered names.

Never import paths: a plan from a file can name only what is registered, by gradsync or by the user.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar

C = TypeVar("C", bound="type[Nameable]")


class Nameable:
    """A frozen dataclass of settings that a plan can name, once its class is registered."""

    kind: ClassVar[str]  # of the family, for errors
    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Holds numbers and texts to what they are annotated as; who overrides it calls this first.

        Raises:
            ValueError: for a float or a bool where a whole number belongs, and the like.
        """
        for setting in fields(self):  # type: ignore[arg-type]  # dataclass by register
            annotation = str(getattr(setting.type, "__name__", setting.type))  # a text where annotations are postponed
            given = getattr(self, setting.name)
            if annotation in _SETTINGS and not _is_of(given, *_SETTINGS[annotation][1:]):
                raise ValueError(
                    f"{type(self).__name__}.{setting.name} must be {_SETTINGS[annotation][0]}, got {given!r}"
                )


_SETTINGS: dict[str, tuple[Any, ...]] = {
    "int": ("a whole number", int),
    "float": ("a number", int, float),
    "float | None": ("a number or None", int, float, type(None)),
    "bool": ("True or False", bool),
    "str": ("a text", str),
    "str | None": ("a text or None", str, type(None)),
}


def _is_of(value: Any, *types: type) -> bool:
    """Whether it is of one of the types, where a bool is no int."""
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


_registry: dict[str, type[Nameable]] = {}


def register(named: C) -> C:
    """Class decorator: makes a class nameable in plans, as its class name in snake case unless it has a `name`.

    Raises:
        ValueError: when the name is taken by another class.
    """
    if "name" not in vars(named):
        named.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", named.__name__).lower()
    if not is_dataclass(named):
        raise ValueError(f"a {named.kind} must be a (frozen) dataclass, {named.__name__} is not")
    taken = _registry.setdefault(named.name, named)
    if taken is not named:
        raise ValueError(f"the {named.kind} name {named.name!r} is taken by {taken.__module__}.{taken.__qualname__}")
    return named


def registered(family: Any) -> dict[str, Any]:
    """All members of a family that a plan can name."""
    return {name: named for name, named in _registry.items() if issubclass(named, family)}


def to_expression(named: Nameable) -> dict[str, Any]:
    """It, as a tree of registered names and numbers.

    Raises:
        ValueError: for what is not registered, which no plan could name (a subclass counts for itself).
    """
    if _registry.get(getattr(named, "name", "")) is not type(named):
        raise ValueError(
            f"the {named.kind} {type(named).__name__} is not registered; decorate its class with @register"
        )
    settings = {f.name: getattr(named, f.name) for f in fields(named)}  # type: ignore[arg-type]  # dataclass by register
    return {named.name: {name: _plain(value) for name, value in settings.items()}}


def from_expression(expression: Any, family: Any, kind: str) -> Any:
    """The member of `family`, called a `kind` in errors, that an expression names.

    Raises:
        ValueError: naming what is unknown or illegal, and what there is.
    """
    made = _made(expression, kind)
    if not isinstance(made, family):
        raise ValueError(f"{made.name!r} is a {made.kind}, expected a {kind}")
    return made


def _made(expression: Any, kind: str) -> Nameable:
    if not isinstance(expression, dict) or len(expression) != 1:
        raise ValueError(f'a {kind} is written {{"name": {{settings}}}}, got {expression!r}')
    ((name, settings),) = expression.items()
    if name not in _registry:
        there_are = sorted(known for known, named in _registry.items() if named.kind == kind)
        raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(there_are)}")
    named = _registry[name]
    if not isinstance(settings, dict):
        raise ValueError(f"the settings of {named.kind} {name!r} must be an object, got {settings!r}")
    known = {f.name: f for f in fields(named)}  # type: ignore[arg-type]  # dataclass by register
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"{named.kind} {name!r} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    arguments = {key: _setting(value, str(known[key].type), kind) for key, value in settings.items()}
    try:
        return named(**arguments)
    except TypeError as error:
        raise ValueError(f"{named.kind} {name!r}: {error}") from None


def _setting(value: Any, annotation: str, kind: str) -> Any:
    """A setting as JSON has it; what is annotated as one of a family is an expression in turn."""
    if "Compressor" in annotation:
        kind = "compressor"
    elif "Scheme" in annotation or "Partitioned" in annotation:
        kind = "scheme"
    else:
        return value
    if isinstance(value, list):
        return tuple(_made(part, kind) for part in value)
    return None if value is None else _made(value, kind)


def _plain(value: Any) -> Any:
    """A setting as JSON gives it back: tuples are lists there."""
    if isinstance(value, Nameable):
        return to_expression(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
