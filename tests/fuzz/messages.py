"""Random changes to fields of protobuf messages: most changes to their bytes only make them unreadable.

Lives here: reflection over descriptors. Must not: know a message.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

__all__ = ["change"]

_INTEGERS = (
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    16,
    64,
    255,
    2**16,
    2**31 - 1,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
)
_FLOATS = (0.0, -0.0, 1.5, -1.0, 1e300, float("inf"), float("nan"))
_BYTES = (b"", b"\0", b"\1", b"ab", b"\xff" * 4, b"\1\0\0\0x", bytes(16), bytes(64), b"\xc3\x28")
_TEXTS = ("", "0", "1", "-1", "true", "nan", "2,4", "../x", "/", "\0", "ü", "x" * 300, "99999999999999999999")
_MOST = 64
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def change(message: Message, chance: random.Random, words: Sequence[str] = ()) -> None:
    """Set, add, remove or repeat something in `message`, or in a message in it. `words` are strings worth trying."""
    fields = message.DESCRIPTOR.fields
    there = [field for field, _ in message.ListFields() if _is_message(field)]
    if there and chance.random() < 0.7:
        inner = _one_inside(message, chance.choice(there), chance)
        if inner is not None:
            change(inner, chance, words)
            return
    _change_field(message, chance.choice(fields), chance, words)


def _is_message(field: FieldDescriptor) -> bool:
    return field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE


def _is_map(field: FieldDescriptor) -> bool:
    return _is_message(field) and field.message_type.GetOptions().map_entry


def _one_inside(message: Message, field: FieldDescriptor, chance: random.Random) -> Message | None:
    value: Any = getattr(message, field.name)
    if _is_map(field):
        values = [value[key] for key in sorted(value)]
        return chance.choice(values) if values and isinstance(values[0], Message) else None
    return chance.choice(value) if field.is_repeated else value  # type: ignore[no-any-return]


def _change_field(message: Message, field: FieldDescriptor, chance: random.Random, words: Sequence[str]) -> None:
    value: Any = getattr(message, field.name)
    if chance.random() < 0.15:
        message.ClearField(field.name)
    elif _is_map(field):
        _change_map(value, field, chance, words)
    elif field.is_repeated:
        _change_repeated(value, field, chance, words)
    elif _is_message(field):
        value.SetInParent()
        change(value, chance, words)
    else:
        setattr(message, field.name, _scalar(field, chance, words))


def _change_map(value: Any, field: FieldDescriptor, chance: random.Random, words: Sequence[str]) -> None:
    keys, values = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    if len(value) >= _MOST or (len(value) and chance.random() < 0.3):
        del value[chance.choice(sorted(value))]
        return
    key = _scalar(keys, chance, words)
    if _is_message(values):
        change(value[key], chance, words)
    else:
        value[key] = _scalar(values, chance, words)


def _change_repeated(value: Any, field: FieldDescriptor, chance: random.Random, words: Sequence[str]) -> None:
    match chance.randrange(4) if len(value) else 0:
        case 0 if len(value) < _MOST:
            if _is_message(field):
                change(value.add(), chance, words)
            else:
                value.append(_scalar(field, chance, words))
        case 1 if len(value) < _MOST:
            one = chance.choice(value)
            value.add().CopyFrom(one) if _is_message(field) else value.append(one)
        case 2 if not _is_message(field):
            value[chance.randrange(len(value))] = _scalar(field, chance, words)
        case _:
            del value[chance.randrange(len(value))]


def _scalar(field: FieldDescriptor, chance: random.Random, words: Sequence[str]) -> Any:
    kind = field.cpp_type
    if kind in _LIMITS:
        low, high = _LIMITS[kind]
        return min(max(chance.choice(_INTEGERS), low), high)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return chance.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice([*field.enum_type.values_by_number, 99])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice(_BYTES)
    return chance.choice((*_TEXTS, *words, *words))
