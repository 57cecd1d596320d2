"""A model's configuration as JSON, for models that look at it and complete it.

Lives here: the way there and back. Must not: what a configuration means. The form is that of Triton's Python backend:
the names of `model_config.proto`, fields without presence always there, and numbers as numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError

_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
"""Protobuf writes these as strings, as not every language has numbers of 64 bits."""


def config_json(config: pb.ModelConfig) -> str:
    """`config` as JSON."""
    fields = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    known = cast("Mapping[str, FieldDescriptor]", config.DESCRIPTOR.fields_by_name)
    return json.dumps({name: _with_numbers(one, known[name]) for name, one in fields.items()})


def with_completed(config: pb.ModelConfig, completed: str) -> pb.ModelConfig:
    """What a model has made of `config`, as JSON. Raises ConfigError if that is none, or a model's of another name."""
    try:
        made = json_format.Parse(completed, pb.ModelConfig())
    except json_format.ParseError as error:
        raise ConfigError(f"auto_complete_config: {error}") from None
    if made.name != config.name:
        raise ConfigError(f"auto_complete_config: expected name '{config.name}', got '{made.name}'")
    return made


def _with_numbers(value: object, field: FieldDescriptor) -> object:
    """The JSON `value` of `field`, with numbers in place of the strings that stand for those of 64 bits."""
    if isinstance(value, list):
        return [_with_numbers(one, field) for one in value]
    if isinstance(value, str):
        return int(value) if field.cpp_type in _WIDE else value
    message = field.message_type
    if not isinstance(value, dict) or message is None:
        return value
    if message.GetOptions().map_entry:
        return {key: _with_numbers(one, message.fields_by_name["value"]) for key, one in value.items()}
    return {name: _with_numbers(one, message.fields_by_name[name]) for name, one in value.items()}
