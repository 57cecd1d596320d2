"""A model's `config.pbtxt` as protobuf's text format, and what may have been meant where it can't be read.

Lives here: reading that file. Must not: know what its fields mean.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from google.protobuf import text_format

from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.files import check_file
from paceline.server.models.batch_policy import nearest

__all__ = ["parse_config"]

_COMMENT_OR_STRING = re.compile(rb"""(#[^\n]*)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?""")
"""A quote opens a string that ends at the next one or with its line, except that a backslash takes the next byte's
meaning away; in it, # begins no comment. Bytes suffice: in UTF-8, those of ASCII are nothing but that."""

_UNKNOWN = re.compile(r'(Message|Enum) type "([^"]+)" has no (?:field|value) named "?(\w+)"?\.$')


def parse_config(path: Path) -> pb.ModelConfig:
    """The configuration in `path`, a `ModelConfig` in protobuf's text format. Raises ConfigError with line and
    column. Comments may have any encoding, as they say nothing."""
    try:
        check_file(path)
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        text = _COMMENT_OR_STRING.sub(_readable, content).decode()
        return text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path}:{error}{_hint(str(error))}") from None
    except UnicodeDecodeError as error:
        before, byte = error.object[: error.start].decode(), error.object[error.start]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ConfigError(f"{path}:{line}:{column} : Expected UTF-8, got byte 0x{byte:02x}") from None
    except (OSError, ValueError) as error:  # an enum's number beyond 64 bits
        raise ConfigError(f"{path} can't be read: {error}") from None


def _hint(error: str) -> str:
    """What may have been meant where protobuf's `error` is a name that it doesn't know; else nothing."""
    if (found := _UNKNOWN.search(error)) is None:
        return ""
    kind, what, name = found.groups()
    pool = pb.DESCRIPTOR.pool
    if kind == "Enum":
        return f" Expected one of {', '.join(pool.FindEnumTypeByName(what).values_by_name)}."
    if name.isdigit():
        return " A list is written in brackets, as in [ 16, 32 ]."
    known = pool.FindMessageTypeByName(what).fields_by_name
    for one in known.values():
        if one.message_type and name in one.message_type.fields_by_name:
            return f" It is a field of {one.name}."
    near = nearest(name, known)
    return f" Did you mean {near}?" if near else f" Expected one of {', '.join(known)}."


def _readable(found: re.Match[bytes]) -> bytes:
    """A comment that is UTF-8, as error texts may quote it; a string as it is."""
    return found[1].decode(errors="backslashreplace").encode() if found[1] else found[0]
