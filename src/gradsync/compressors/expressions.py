"""Expressions: schemes and compressors in the JSON of plans, as trees `{"name": {"field": value}}` of registered names.

An expression never holds an import path: a plan file can name only classes that gradsync or the user registered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from importlib import import_module
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

C = TypeVar("C", bound="type[Nameable]")

PACKAGES = ("gradsync.compressors", "gradsync.schemes")  # whose modules register members of the families
NAMES = "gradsync.names"  # group of entry points: classes that other distributions register, by name

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
Ratio = Annotated[float, Interval(gt=0, le=1)]  # a share that is never empty, as of the elements that are kept
Decay = Annotated[float, Interval(ge=0, lt=1)]  # the factor of a running sum in each step, as momentum


class Word(StrEnum):
    """An enum of words for a setting with a few choices; plans contain the chosen word as a string."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the pydantic schema of a field of this type, which reads a member or its word even in strict mode."""
        from pydantic_core import core_schema

        return core_schema.enum_schema(cls, list(cls), sub_type="str", strict=False)


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
        named: Any = type(self)
        _annotations(named)  # raises where an annotation means nothing
        defaults = {setting.name: setting.default for setting in fields(named)}
        settings = {name: getattr(self, name) for name in defaults}
        given = {name: value for name, value in settings.items() if value is not defaults[name]}
        for name, value in _checked(named, given).items():
            if value is not given[name]:
                object.__setattr__(self, name, value)

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
    """Returns a scheme or compressor as a tree of registered names and settings, ready for JSON.

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
    """Returns the scheme or compressor that an expression names, an instance of `family`.

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
        return named(**_checked(named, settings))
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


def _checked(named: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks settings of a class against their annotations; returns them with tuples for lists, objects for JSON."""
    if not given:
        return {}  # without pydantic, whose import takes time
    types = _annotations(named)
    frozen = {name: _frozen(value) if _has_tuple(types[name]) else value for name, value in given.items()}
    validate = _adapter(named).validator.validate_python
    try:
        read = validate(frozen)
    except ValueError as error:  # pydantic's
        raise ValueError(_told(named, error)) from None
    return {name: _exactly(value, read[name]) for name, value in frozen.items()}


def _exactly(given: Any, read: Any) -> Any:
    """Returns a setting as pydantic read it, but ints as given: a ratio of 1 has another plan digest than 1.0."""
    if type(read) is tuple:
        return tuple(map(_exactly, given, read))
    if type(read) is dict:
        return {key: _exactly(given[key], value) for key, value in read.items()}
    return given if isinstance(given, int) else read


@cache
def _adapter(named: Any) -> TypeAdapter[Any]:
    """Returns a pydantic adapter that checks some or all settings of a class, made once a class."""
    from pydantic import ConfigDict, TypeAdapter, with_config
    from typing_extensions import TypedDict

    annotations = {name: _by_value(each) for name, each in _annotations(named).items()}
    settings: Any = TypedDict(f"{named.__name__}Settings", annotations, total=False)  # type: ignore[misc]  # made at run time
    return TypeAdapter(with_config(ConfigDict(strict=True, arbitrary_types_allowed=True))(settings))


@cache
def _annotations(named: Any) -> dict[str, Any]:
    """Returns the types of a class's settings, by name.

    Raises:
        ValueError: for an annotation whose names do not exist at run time.
    """
    try:
        hints = get_type_hints(named, include_extras=True)
    except NameError as error:
        raise ValueError(f"the annotations of {named.__name__} must be importable at run time: {error}") from None
    return {setting.name: hints[setting.name] for setting in fields(named)}


_IN_WORDS = {  # our words for some of pydantic's types of errors
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "True or False",
    "tuple_type": "a list",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
}


def _told(named: Any, error: Any) -> str:
    """Returns pydantic's first error in our words: which setting, what it must be, and what it is."""
    first = error.errors()[0]
    # Of a union pydantic also names the branch, as `function-plain[read()]`.
    where = ".".join([named.__name__, *(str(place) for place in first["loc"] if "[" not in str(place))])
    if first["type"] == "value_error":
        return f"{where}: {first['ctx']['error']}"
    annotation = _annotations(named)[str(first["loc"][0])]
    form = _IN_WORDS.get(first["type"])
    expected = form.format(**first.get("ctx", {})) if form else first["msg"].removeprefix("Input should be ")
    if first["type"].startswith(("greater_than", "less_than")):
        expected = _interval(annotation) or expected
    or_none = " or None" if type(None) in get_args(annotation) else ""
    return f"{where} must be {expected}{or_none}, got {first['input']!r}"


def _interval(annotation: Any) -> str | None:
    """Returns the first interval in an annotation in words, as "in (0, 1]"; None if there is none."""
    for each in getattr(annotation, "__metadata__", ()):
        if isinstance(each, Interval):
            low = f"({each.gt}" if each.ge is None else f"[{each.ge}"
            return f"in {low}, {each.lt})" if each.le is None else f"in {low}, {each.le}]"
    return next(filter(None, map(_interval, get_args(annotation))), None)


def _has_tuple(annotation: Any) -> bool:
    """Whether a setting of this type may be a tuple, or holds tuples."""
    return tuple in (annotation, get_origin(annotation)) or any(map(_has_tuple, get_args(annotation)))


def _by_value(annotation: Any) -> Any:
    """Returns the type of a setting, changed so that pydantic also reads enum members from their values."""
    from pydantic import Strict

    if isinstance(annotation, type) and issubclass(annotation, Enum) and not issubclass(annotation, Word):
        return Annotated[annotation, Strict(False)]
    if get_origin(annotation) in (Union, UnionType):
        return Union[tuple(map(_by_value, get_args(annotation)))]  # noqa: UP007 (made of a tuple)
    return annotation


def _frozen(value: Any) -> Any:
    """Returns a setting with tuples in place of lists, at any depth."""
    return tuple(map(_frozen, value)) if type(value) in (list, tuple) else value


def _plain(value: Any) -> Any:
    """Returns a setting with the types of JSON: lists for tuples, expressions for schemes and compressors."""
    if isinstance(value, Nameable):
        return to_expression(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
