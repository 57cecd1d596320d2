"""A model's file and the files beside it that hold its weights, read; and what the file says about its graph and ONNX
Runtime doesn't: to it a tensor without a shape, which may have any rank, looks like a scalar.

Lives here: as much of protobuf's wire format as that takes. Must not: onnxruntime. It would map those files, and a
served model would change, or end the server with SIGBUS, when somebody writes to them. It would also look for them
under their canonical paths, where those behind links such as `/proc/PID/root` aren't. Field numbers are those of
`onnx.proto`.
"""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path, PurePosixPath

from paceline.backends.errors import LoadError
from paceline.backends.paths import open_inside

_MODEL, _GRAPH, _SUBGRAPH, _FUNCTION, _NODE, _ATTRIBUTE, _SPARSE, _INITIALIZER, _TENSOR = range(9)
_PARTS: Mapping[int, Mapping[int, int]] = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _INITIALIZER, 15: _SPARSE},
    _SUBGRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _SUBGRAPH, 10: _TENSOR, 11: _SUBGRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
}
"""Where tensors are, by kind of message and number of its field."""
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14  # of TensorProto
_KEY, _VALUE = 1, 2  # of StringStringEntryProto
_GRAPH_OF_MODEL = 7  # of ModelProto
_WEIGHTS, _TENSORS = 5, (11, 12)  # of GraphProto; input and output
_DATA_TYPE, _HALVES = 2, (10, 16)  # of TensorProto; FLOAT16 and BFLOAT16
_RESULT, _OPERATOR = 2, 4  # of NodeProto: output and op_type
_NAME, _SHAPE = 1, (2, 1, 2)  # of ValueInfoProto; its type, tensor_type and shape

_FIXED = {1: 8, 5: 4}
"""Sizes of fields, by wire type."""

_PIECE_BYTES = 2**20
"""Read at once, and still in the processor's cache for its checksum."""
_MAX_MODEL_BYTES = 2**31 - 1
"""What protobuf parses."""

Nodes = Mapping[int, list[memoryview]]
"""By the kind of message that they are in."""

Stamp = tuple[int, int]
"""Size in bytes and CRC-32 of a file's content, which only accidents have to differ by: files are trusted."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model's files say. `stamps`, one for each file, tell later whether any of them has changed. `operators`:
    the types of the graph's nodes; `inner_operators`: those of nodes in subgraphs of others, and in functions;
    `shapeless`: the names of its inputs and outputs that have no shape; `halves`: some of its weights are floats of 16
    bits; `trains`: it has, wherever, a BatchNormalization in training mode, which by ONNX has further outputs, with
    whatever version of that operator. Nothing is known of other formats, some of which ONNX Runtime reads."""

    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    inner_operators: frozenset[str] = frozenset()
    shapeless: frozenset[str] = frozenset()
    halves: bool = False
    trains: bool = False


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What ONNX Runtime is to open: `model`, a path or a model's bytes, with the content of other files in `weights`,
    by the name that the model has for them."""

    model: str | bytes
    facts: Facts = field(default_factory=Facts)
    weights: Mapping[str, mmap.mmap] = field(default_factory=dict)


def read_model_files(path: Path) -> ModelFiles:
    """The model in `path`: its path if it has no weights in other files, else its bytes and theirs. Blocks, and reads
    all of them. Raises LoadError if one of them can't be read, or isn't inside the folder of the model's file."""
    try:
        with FileIO(path) as file:
            content, stamp = _read(file)
    except OSError as error:
        raise LoadError(str(error.strerror)) from error
    weights = _Weights(path)
    view = memoryview(content)[: stamp[0]]
    try:
        nodes: Nodes = {_GRAPH: [], _SUBGRAPH: [], _FUNCTION: []}
        changed = _changed(view, _MODEL, weights, nodes)
        facts = Facts({"": stamp, **weights.stamps}, *_described(view, nodes))
    except (ValueError, IndexError, RecursionError):
        # Another format, or no model: ONNX Runtime reads it, or says what is wrong.
        return ModelFiles(str(path), Facts({"": stamp}))
    if not weights.stamps:
        return ModelFiles(str(path), facts)
    model = bytes(view) if changed is None else changed
    if len(model) > _MAX_MODEL_BYTES:
        raise LoadError(
            "expected less than 2 GiB of weights in subgraphs, functions and constants, which become part of the "
            f"model, got {len(model)} bytes"
        )
    return ModelFiles(model, facts, weights.named)


def files_changed(name: str) -> LoadError:
    """What a further instance of a model is refused with, if it would give other answers than those before it."""
    return LoadError(f"model '{name}': its files have changed since it was loaded; load it again")


class _Weights:
    """The files beside the model's own, each read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._contents: dict[str, mmap.mmap] = {}
        self.stamps: dict[str, Stamp] = {}
        self.named: dict[str, mmap.mmap] = {}

    def name(self, tensor: memoryview) -> bytes | None:
        """`tensor` with its file called as in `named`; None if it has none, or is like that already."""
        place = _place(tensor)
        if place is None:
            return None
        name = self._read(place)
        self.named[name] = self._contents[name]
        if name == place.get("location"):
            return None
        kept = [tensor[begin:end] for number, begin, end, _ in _fields(tensor) if number != _EXTERNAL_DATA]
        entries = {**place, "location": name}
        pairs = (_field(_KEY, key.encode()) + _field(_VALUE, value.encode()) for key, value in entries.items())
        return b"".join([*kept, *(_field(_EXTERNAL_DATA, pair) for pair in pairs)])

    def include(self, tensor: memoryview) -> bytes | None:
        """`tensor` with its data in it; None if it has no file."""
        place = _place(tensor)
        if place is None:
            return None
        content = self._contents[self._read(place)]
        start = int(place.get("offset", 0))
        end = start + int(place["length"]) if "length" in place else len(content)
        if not 0 <= start <= end <= len(content):
            raise LoadError(
                f"its weights '{place.get('location')}': expected bytes {start} to {end}, got {len(content)} bytes"
            )
        # Of a field that is there twice, the last one counts.
        return b"".join([tensor, _field(_RAW_DATA, content[start:end]), _varint(_DATA_LOCATION << 3), _varint(0)])

    def _read(self, place: Mapping[str, str]) -> str:
        """Read the file, and return its name in `_contents`. Raises LoadError."""
        location = place.get("location", "")
        # Before 1.31, ONNX Runtime doesn't find "./name".
        name = str(PurePosixPath(location))
        if name in self._contents:
            return name
        try:
            file = None if name.startswith("/") else open_inside(self._path.parent, location, beside=self._path.name)
            if file is None:
                raise LoadError(f"its weights: expected a file inside the model's folder, got '{location}'")
            with file:
                self._contents[name], self.stamps[name] = _read(file)
        except OSError as error:
            raise LoadError(f"its weights '{location}': {error.strerror}") from error
        return name


def _read(file: FileIO) -> tuple[mmap.mmap, Stamp]:
    """What is in `file`. Raises OSError."""
    before = _last_change(file)
    size = before[0]
    # Unlike that of `bytes`, this memory is the system's again as soon as nobody needs it.
    content = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view, at, checksum = memoryview(content), 0, 0
    while at < size and (got := file.readinto(view[at : min(size, at + _PIECE_BYTES)])):
        checksum = zlib.crc32(view[at : at + got], checksum)
        at += got
    if at < size or _last_change(file) != before:
        raise OSError(errno.EBUSY, "it was written to while it was read")
    return content, (size, checksum)


def _last_change(file: FileIO) -> tuple[int, int]:
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns


def _changed(message: memoryview, kind: int, weights: _Weights, nodes: Nodes) -> bytes | None:
    """`message` with its tensors changed so that ONNX Runtime needs no files; None if they needn't be. Its nodes are
    added to `nodes`: a second walk through all of a large model would take as long as this one."""
    if kind == _INITIALIZER:
        return weights.name(message)
    if kind == _TENSOR:
        return weights.include(message)
    parts, pieces, done = _PARTS[kind], list[bytes | memoryview](), 0
    for number, begin, end, value in _fields(message):
        if number not in parts or isinstance(value, int):
            continue
        if parts[number] == _NODE:
            nodes[kind].append(value)
        changed = _changed(value, parts[number], weights, nodes)
        if changed is not None:
            pieces += [message[done:begin], _field(number, changed)]
            done = end
    return b"".join([*pieces, message[done:]]) if pieces else None


def _described(model: memoryview, nodes: Nodes) -> tuple[frozenset[str], frozenset[str], frozenset[str], bool, bool]:
    """`operators`, `inner_operators`, `shapeless`, `halves` and `trains` of `Facts`. Raises as `_fields`."""
    operators, inner, shapeless, halves, trains = set[str](), set[str](), set[str](), False, False
    for kind, of_kind in nodes.items():
        for node in of_kind:
            types = {bytes(name).decode() for name in _inside(node, _OPERATOR)}
            (operators if kind == _GRAPH else inner).update(types)
            trains |= "BatchNormalization" in types and len([*_inside(node, _RESULT)]) > 1
    for graph in _inside(model, _GRAPH_OF_MODEL):
        for number, _, _, part in _fields(graph):
            if isinstance(part, int):
                continue
            if number == _WEIGHTS:
                halves |= any(one == _DATA_TYPE and value in _HALVES for one, _, _, value in _fields(part))
            elif number in _TENSORS and not [*_inside(part, *_SHAPE)]:
                shapeless |= {bytes(name).decode() for name in _inside(part, _NAME)}
    return frozenset(operators), frozenset(inner), frozenset(shapeless), halves, trains


def _inside(message: memoryview, wanted: int, *path: int) -> Iterator[memoryview]:
    """The contents of the fields that these field numbers lead to, through nested messages. Raises as `_fields`."""
    for number, _, _, value in _fields(message):
        if number == wanted and not isinstance(value, int):
            yield from _inside(value, *path) if path else (value,)


def _place(tensor: memoryview) -> dict[str, str] | None:
    """Where the data of `tensor` is: location, offset and length; None if that is in itself."""
    place, is_external = {}, False
    for number, _, _, value in _fields(tensor):
        if number == _DATA_LOCATION:
            is_external = value == 1
        elif number == _EXTERNAL_DATA and not isinstance(value, int):
            entry = {part: bytes(text).decode() for part, _, _, text in _fields(value) if not isinstance(text, int)}
            place[entry.get(_KEY, "")] = entry.get(_VALUE, "")
    return place if is_external else None


def _fields(message: memoryview) -> Iterator[tuple[int, int, int, memoryview | int]]:
    """Number, begin, end and content of each field; the content of those of fixed size is 0. ValueError or IndexError
    if it isn't a message."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _read_varint(message, at)
        value: memoryview | int = 0
        if key & 7 == 0:
            value, at = _read_varint(message, at)
        elif key & 7 == 2:
            size, start = _read_varint(message, at)
            at = start + size
            value = message[start:at]
        elif key & 7 in _FIXED:
            at += _FIXED[key & 7]
        else:
            raise ValueError("no message")
        if at > len(message):
            raise ValueError("no message")
        yield key >> 3, begin, at, value


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while shift < 64:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("no number")


def _field(number: int, content: bytes) -> bytes:
    return b"".join([_varint(number << 3 | 2), _varint(len(content)), content])


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
