"""Settings of frozen dataclasses and constructors, held to their annotations: a float or a bool is no whole number.

Pydantic checks them strictly, and is imported with the first setting that is not a default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum, StrEnum
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

PositiveInt = Annotated[int, Ge(1)]
SeveralInt = Annotated[int, Ge(2)]
NonNegativeInt = Annotated[int, Ge(0)]
FewInt = Annotated[int, Interval(ge=1, le=1000)]  # such as steps from one average to the next
FewOrZeroInt = Annotated[int, Interval(ge=0, le=1000)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
PositiveFinite = Annotated[float, Interval(gt=0, lt=math.inf)]
Steps = Annotated[int, Interval(ge=1, le=10**6)]  # training steps that are planned one by one
NonNegativeFinite = Annotated[float, Interval(ge=0, lt=math.inf)]
Ratio = Annotated[float, Interval(gt=0, le=1)]  # a share that is never empty, as of the elements that are kept
TimeLimit = Annotated[float, Interval(gt=0, le=1e9)]  # seconds; torch counts them in nanoseconds of 64 bits
Decay = Annotated[float, Interval(ge=0, lt=1)]  # the factor of a running sum in each step, as momentum


class Word(StrEnum):
    """An enum of words for a setting with a few choices; plans contain the chosen word as a string."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the pydantic schema of a field of this type, which reads a member or its word even in strict mode."""
        from pydantic_core import core_schema

        return core_schema.enum_schema(cls, list(cls), sub_type="str", strict=False)


def check(settings: Any) -> None:
    """Checks a frozen dataclass's fields against their annotations, in its `__post_init__`; defaults are trusted.

    JSON's types may stand for a field's own: a list for a tuple, {"name": {settings}} for a scheme or compressor. They
    are replaced by what the annotation says.

    Raises:
        ValueError: for the first field that does not fit, with its name, what it must be, and what it is.
    """
    owner: Any = type(settings)
    types_of(owner)  # raises where an annotation means nothing
    defaults = {setting.name: setting.default for setting in fields(owner)}
    values = {name: getattr(settings, name) for name in defaults}
    given = {name: value for name, value in values.items() if value is not defaults[name]}
    for name, value in checked(owner, given).items():
        if value is not given[name]:
            object.__setattr__(settings, name, value)


def checked(named: Any, given: Mapping[str, Any], whose: str | None = None) -> dict[str, Any]:
    """Checks settings of a dataclass by its annotations, and returns them in the types that these say.

    JSON's types may stand for them: lists become tuples, and {"name": {settings}} the scheme or compressor of this
    name.

    Args:
        named: the dataclass.
        given: the settings by name.
        whose: the words before a setting's name in errors; None: the class and a dot.

    Raises:
        ValueError: for the first setting that does not fit, with its name, what it must be, and what it is.
    """
    if not given:
        return {}  # without pydantic, whose import takes time
    types = types_of(named)
    frozen = {name: _frozen(value) if _has_tuple(types[name]) else value for name, value in given.items()}
    validate = _adapter(named).validator.validate_python
    try:
        read = validate(frozen)
    except ValueError as error:  # pydantic's
        first = error.errors()[0]  # type: ignore[attr-defined]
        where = f"{named.__name__}." if whose is None else whose
        raise ValueError(_told(first, types[str(first["loc"][0])], where)) from None
    return {name: _exactly(value, read[name]) for name, value in frozen.items()}


def argument(name: str, given: Any, annotation: Any) -> Any:
    """Checks an argument of a function by a type annotation, and returns it in the type that this says.

    JSON's types may stand for it: lists become tuples, and {"name": {settings}} the scheme or compressor of this name.

    Args:
        name: the argument's name, for errors.
        given: its value.
        annotation: the type, which may have bounds, as `PositiveInt`.

    Raises:
        ValueError: with the argument's name, what it must be, and what it is.
    """
    frozen = _frozen(given) if _has_tuple(annotation) else given
    try:
        read = _adapter_of(annotation).validator.validate_python(frozen)
    except ValueError as error:  # pydantic's
        first = error.errors()[0]  # type: ignore[attr-defined]
        raise ValueError(_told(first, annotation, f"{name}." if first["loc"] else name)) from None
    return _exactly(frozen, read)


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

    types = {name: _by_value(each) for name, each in types_of(named).items()}
    settings: Any = TypedDict(f"{named.__name__}Settings", types, total=False)  # type: ignore[misc]  # made at run time
    return TypeAdapter(with_config(ConfigDict(strict=True, arbitrary_types_allowed=True))(settings))


@cache
def _adapter_of(annotation: Any) -> TypeAdapter[Any]:
    """Returns a pydantic adapter that checks one value, made once for a type."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(_by_value(annotation), config=ConfigDict(strict=True, arbitrary_types_allowed=True))


@cache
def types_of(named: Any) -> dict[str, Any]:
    """Returns the types of a class's settings by name, as its annotations give them.

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
    "less_than_equal": "at most {le:,g}",
}
MOST_SHOWN = 200  # characters of what was given


def _told(first: Any, annotation: Any, whose: str) -> str:
    """Returns an error of pydantic in our words: which setting, what it must be, and what it is."""
    # Of a union pydantic also names the branch, as `function-plain[read()]`.
    where = whose + ".".join(str(place) for place in first["loc"] if "[" not in str(place))
    if first["type"] == "value_error":
        return f"{where}: {first['ctx']['error']}"
    form = _IN_WORDS.get(first["type"])
    expected = form.format(**first.get("ctx", {})) if form else first["msg"].removeprefix("Input should be ")
    if first["type"].startswith(("greater_than", "less_than")):
        expected = _interval(annotation) or expected
    or_none = " or None" if type(None) in get_args(annotation) else ""
    return f"{where} must be {expected}{or_none}, got {shown(first['input'])}"


def shown(given: object) -> str:
    """Returns a value as an error shows it: its `repr`, cut to `MOST_SHOWN` characters."""
    try:
        text = repr(given)
    except Exception:  # of a user's class, or a whole number with too many digits
        text = f"a {type(given).__name__} that cannot be shown"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


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
    if type(value) is dict:
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if type(value) in (list, tuple) else value
