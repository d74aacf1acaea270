"""Types of settings that two or more parts share: numbers with their bounds, and names of files. Pure.

A settings dataclass declares `cycle_seconds: Positive` and calls `check_bounds` when it is created.
The composition root converts texts of files, variables and flags by the same types.
"""

import math
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, NewType

import msgspec
from msgspec import Meta

FilePath = NewType("FilePath", str)
"""A setting that names a file or folder, as written in the configuration. The caller that opens it converts
it to a path: settings need no file system.
"""
Positive = Annotated[float, Meta(gt=0)]
"""Seconds, rates and factors."""
NonNegative = Annotated[float, Meta(ge=0)]
"""Seconds, weights and factors that zero turns off."""
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
PartialShare = Annotated[float, Meta(gt=0, lt=1)]
PositiveInt = Annotated[int, Meta(ge=1)]
"""Numbers of things, and bytes."""
NonNegativeInt = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
"""TCP port; 0: any free one."""

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOUNDS = (("gt", "above"), ("ge", "of at least"), ("lt", "below"), ("le", "at most"))


@cache
def setting_types(kind: type) -> dict[str, Any]:
    """Return the type of each field of a settings dataclass, with its bounds."""
    return typing.get_type_hints(kind, include_extras=True)


def allowed_values(hint: Any) -> str:
    """Describe the values that a setting of this type may have: `a number above 0 or unset`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(allowed_values(member) for member in typing.get_args(hint))
    if hint is type(None):
        return "unset"
    if typing.get_origin(hint) is Literal:
        *others, last = map(str, typing.get_args(hint))
        return f"{', '.join(others)} or {last}" if others else last
    if typing.get_origin(hint) is tuple:
        return f"a list of {allowed_values(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is Annotated:
        number, bounds = typing.get_args(hint)
        return f"{_NAMES[number]} {_range(bounds)}"
    return _NAMES.get(hint, "a file")


def _range(bounds: Meta) -> str:
    if bounds.ge is not None and bounds.le is not None:
        return f"from {bounds.ge} to {bounds.le}"
    given = ((word, getattr(bounds, name)) for name, word in _BOUNDS)
    return " and ".join(f"{word} {bound}" for word, bound in given if bound is not None)


def converted(
    value: object, hint: Any, *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None
) -> Any:
    """Return the value as its setting's type. Raises ValueError for a wrong type, a value out of bounds, and
    numbers that are not finite; the message does not contain the value.

    strict: do not read numbers from text. dec_hook: converts to types unknown to msgspec.
    """
    refusal = ValueError(f"must be {allowed_values(hint)}")
    try:
        found = msgspec.convert(value, hint, strict=strict, dec_hook=dec_hook)
    except msgspec.ValidationError:
        raise refusal from None
    if isinstance(found, float) and not math.isfinite(found):
        raise refusal
    return found


def check_bounds(settings: Any) -> None:
    """Check the fields of a settings dataclass whose types list or bound their values. Raises ValueError that
    names the field, the allowed values and the value."""
    kind: Any = type(settings)
    for name, hint in setting_types(kind).items():
        if _bounded(hint):
            value = getattr(settings, name)
            try:
                converted(value, hint)
            except ValueError as error:
                raise ValueError(f"{name} {error}, not {value!r}") from None


def _bounded(hint: Any) -> bool:
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(typing.get_origin(member) in (Annotated, Literal) for member in members)
