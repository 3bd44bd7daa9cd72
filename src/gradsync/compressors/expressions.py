"""Expressions: schemes and compressors in the JSON of plans, as trees `{"name": {"field": value}}` of registered names.

An expression never holds an import path: a plan file can name only classes that gradsync or the user registered.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..inputs.settings import check, checked

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

C = TypeVar("C", bound="type[Nameable]")

PACKAGES = ("gradsync.compressors", "gradsync.schemes")  # whose modules register members of the families
NAMES = "gradsync.names"  # group of entry points: classes that other distributions register, by name


class Nameable:
    """A frozen dataclass of settings that a plan can name, once its class is registered.

    A family is a base class, as `Scheme` or `Compressor`; a member is an instance of a registered subclass. Annotations
    say what settings may be: numbers, strings and Literals, within bounds if they are `Annotated`, members of a family,
    and tuples of all these. Pydantic checks settings strictly: a float or a bool is not an int. Settings may also have
    the types of JSON: a list for a tuple, an expression for a member.
    """

    kind: ClassVar[str]  # what errors call a member, as "scheme"
    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Checks the settings against their annotations. An override calls it first.

        Raises:
            ValueError: for the first setting that does not fit, with its name, what it must be, and what it is.
        """
        check(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the pydantic schema of a field, which reads an instance of this class or its JSON expression."""
        from pydantic_core import PydanticCustomError, core_schema

        def read(given: Any) -> Any:
            if isinstance(given, dict):
                return from_expression(given, cls)
            if isinstance(given, cls):
                return given
            form = f'{_member_of(cls)} (in JSON {{"name": {{settings}}}})'
            raise PydanticCustomError("family", "Input should be {form}", {"form": form})

        written = core_schema.plain_serializer_function_ser_schema(to_expression)
        return core_schema.no_info_plain_validator_function(read, serialization=written)


_registry: dict[str, type[Nameable]] = {}


def register(named: C) -> C:
    """Registers a class, so that plans can name it: a decorator. Its name is `name`, or the class name in snake case.

    Raises:
        ValueError: if the class is not a dataclass, or the name is taken by another class.
    """
    if not named.__module__.startswith("gradsync."):
        _import_members()  # one of which may have the name
    if "name" not in vars(named):
        named.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", named.__name__).lower()
    if not is_dataclass(named):
        raise ValueError(f"a {named.kind} must be a (frozen) dataclass, {named.__name__} is not")
    taken = _registry.setdefault(named.name, named)
    if taken is not named:
        raise ValueError(f"the {named.kind} name {named.name!r} is taken by {taken.__module__}.{taken.__qualname__}")
    return named


def registered(family: Any) -> dict[str, Any]:
    """Returns the registered subclasses of `family`, by name."""
    _import_members()
    return {name: named for name, named in _registry.items() if issubclass(named, family)}


def to_expression(named: Nameable) -> dict[str, Any]:
    """Returns a scheme or compressor as nested dicts of names and settings, ready for JSON.

    For TopK(0.01) it is {"top_k": {"ratio": 0.01, "values": "same"}}.

    Raises:
        ValueError: if the class is not registered. A subclass of a registered class must be registered itself.
    """
    if _registry.get(getattr(named, "name", "")) is not type(named):
        raise ValueError(
            f"the {named.kind} {type(named).__name__} is not registered; decorate its class with @register"
        )
    settings = {f.name: getattr(named, f.name) for f in fields(named)}  # type: ignore[arg-type]  # dataclass by register
    return {named.name: {name: _plain(value) for name, value in settings.items()}}


def from_expression(expression: Any, family: Any) -> Any:
    """Returns the scheme or compressor, an instance of `family`, that `to_expression` made `expression` of.

    Raises:
        ValueError: for an unknown name or setting, listing the known ones, or a setting with an illegal value.
    """
    if not isinstance(expression, dict) or len(expression) != 1:
        raise ValueError(f'a {family.kind} is written {{"name": {{settings}}}}, got {expression!r}')
    ((name, settings),) = expression.items()
    if name not in _registry:
        from importlib.metadata import entry_points

        _import_members()

        for point in entry_points(group=NAMES, name=str(name)):  # of another distribution, which registers it
            point.load()
    if name not in _registry:
        there_are = sorted(known for known, named in _registry.items() if named.kind == family.kind)
        raise ValueError(f"unknown {family.kind} {name!r}; there are {', '.join(there_are)}")
    named = _registry[name]
    if not issubclass(named, family):
        raise ValueError(f"{name!r} is a {named.kind}, expected {_member_of(family)}")
    if not isinstance(settings, dict):
        raise ValueError(f"the settings of {named.kind} {name!r} must be an object, got {settings!r}")
    known = [setting.name for setting in fields(named)]  # type: ignore[arg-type]  # dataclass by register
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"{named.kind} {name!r} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    try:
        return named(**checked(named, settings))
    except TypeError as error:
        raise ValueError(f"{named.kind} {name!r}: {error}") from None


@cache
def _import_members() -> None:
    """Imports all modules that register members, which their packages import with the first use of each only."""
    for package in map(import_module, PACKAGES):
        for name in package.__all__:
            getattr(package, name)


def _member_of(family: type[Nameable]) -> str:
    narrower = "" if "kind" in vars(family) else f" of type {family.__name__}"
    return f"a {family.kind}{narrower}"


def _plain(value: Any) -> Any:
    """Returns a setting with the types of JSON: lists for tuples, expressions for schemes and compressors."""
    if isinstance(value, Nameable):
        return to_expression(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
