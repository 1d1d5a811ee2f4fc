"""Reads a frozen dataclass from a mapping: every key known, every value of its type.

The dataclass is the schema: its field names are the keys, its annotations the types, its defaults
the defaults, and its `__post_init__` says which values are out of range.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, Union, cast

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"
"""What YAML gives."""

T = TypeVar("T")


class ConfigurationError(Exception):
    """The configuration is wrong; the message names the key and says what is expected.

    Attributes:
        key: the key at fault, with dots.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key


def read_section(
    section: type[T],
    values: Mapping[str, Value],
    *,
    where: str,
    defaults: Mapping[str, object] | None = None,
) -> T:
    """Read a section.

    Args:
        section: a dataclass.
        values: keys and values as YAML gives them.
        where: the section's name, for messages; "" at the top.
        defaults: values of fields that the mapping leaves out; they are not converted.

    Raises:
        ConfigurationError: a key is unknown or missing, or a value is not what it must be.
    """
    fields = {one.name: one for one in dataclasses.fields(cast("type[typing.Any]", section))}
    hints = typing.get_type_hints(section)
    for key in values:
        if key not in fields:
            raise unknown_key(key, list(fields), where)
    arguments: dict[str, object] = dict(defaults or {})
    for key, value in values.items():
        arguments[key] = _convert(hints[key], value, dotted(where, key))
    for name, one in fields.items():
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if required and name not in arguments:
            raise ConfigurationError(dotted(where, name), "is required")
    try:
        return section(**arguments)
    except Exception as error:
        raise ConfigurationError(where, str(error)) from error


def unknown_key(key: str, known: Sequence[str], where: str) -> ConfigurationError:
    """Make the error of a key that is not known; name the nearest one."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(sorted(known))}"
    return ConfigurationError(dotted(where, key), f"is not a known key; {hint}")


def dotted(where: str, key: str) -> str:
    """Give the full name of a key."""
    return f"{where}.{key}" if where else key


def _convert(hint: object, value: Value, key: str) -> object:
    """Convert a value to what a field's annotation wants."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(typing.get_args(hint), value, key)
    if origin is Literal:
        if value not in typing.get_args(hint):
            choices = ", ".join(repr(choice) for choice in typing.get_args(hint))
            raise ConfigurationError(key, f"must be one of {choices}, not {value!r}")
        return value
    if origin is tuple:
        return _convert_tuple(typing.get_args(hint), value, key)
    if origin in (dict, Mapping):
        return _mapping(value, key)
    if not isinstance(hint, type):
        raise TypeError(f"{key}: a field of type {hint!r} cannot be configured")
    if dataclasses.is_dataclass(hint):
        return read_section(hint, _mapping(value, key), where=key)
    if issubclass(hint, enum.Enum):
        return _convert_enum(hint, value, key)
    return _convert_scalar(hint, value, key)


def _convert_union(choices: tuple[object, ...], value: Value, key: str) -> object:
    if value is None and type(None) in choices:
        return None
    remaining = [choice for choice in choices if choice is not type(None)]
    return _convert(remaining[0], value, key)


def _convert_tuple(items: tuple[object, ...], value: Value, key: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise ConfigurationError(key, f"must be a list, not {value!r}")
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(value) != len(items):
        raise ConfigurationError(key, f"must have {len(items)} items, not {len(value)}")
    pairs = enumerate(zip(items, value, strict=True))
    return tuple(_convert(item, one, f"{key}[{index}]") for index, (item, one) in pairs)


def _convert_enum(hint: type[enum.Enum], value: Value, key: str) -> enum.Enum:
    for member in hint:
        if value == member.value or (isinstance(value, str) and value == member.name.lower()):
            return member
    choices = ", ".join(member.name.lower() for member in hint)
    raise ConfigurationError(key, f"must be one of {choices}, not {value!r}")


def _convert_scalar(hint: type, value: Value, key: str) -> object:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    if hint is Path and isinstance(value, str) and value:
        return Path(value).expanduser().absolute()
    if hint is bytes and isinstance(value, str):
        return value.encode()
    expected = _EXPECTED.get(hint)
    if expected is None:
        raise TypeError(f"{key}: a field of type {hint!r} cannot be configured")
    raise ConfigurationError(key, f"must be {expected}, not {value!r}")


_EXPECTED: Mapping[Callable[..., object], str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    bytes: "text",
    Path: "a path",
}


def _mapping(value: Value, key: str) -> Mapping[str, Value]:
    if not isinstance(value, dict):
        raise ConfigurationError(key, f"must be a section with keys, not {value!r}")
    return value
