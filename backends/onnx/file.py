"""What an ONNX file says of its graph and ONNX Runtime doesn't tell: which inputs and outputs have a shape, and what
its nodes are.

Lives here: as much of protobuf's wire format as it takes to find that out, without reading weights. Must not:
onnxruntime. To that a tensor without a shape, which may have any rank, looks like a scalar. Numbers of fields are those
of `onnx.proto`. Files of another format, of which ONNX Runtime reads some, say nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

__all__ = ["operators", "without_shape"]

_GRAPH = 7  # of ModelProto
_NODE = 1  # of GraphProto
_OPERATOR = 4  # of NodeProto: op_type
_TENSORS = (11, 12)  # of GraphProto: input, output
_NAME = 1  # of ValueInfoProto
_SHAPE = (2, 1, 2)  # of ValueInfoProto: type, its tensor_type, its shape

_Span = tuple[int, int]


def without_shape(path: Path) -> frozenset[str]:
    """The names of the graph's inputs and outputs that have no shape. Blocks, for a millisecond per thousand nodes or
    so; raises OSError."""
    names = set()
    with path.open("rb") as file:
        try:
            for graph in _fields(file, (0, file.seek(0, 2)), _GRAPH):
                for number in _TENSORS:
                    for tensor in _fields(file, graph, number):
                        if not _has(file, tensor, _SHAPE):
                            names |= {_read(file, name).decode() for name in _fields(file, tensor, _NAME)}
        except ValueError:
            return frozenset()
    return frozenset(names)


def operators(path: Path) -> frozenset[str]:
    """The types of the graph's nodes, but for those in the bodies of others. Blocks, for some milliseconds per thousand
    nodes; raises OSError."""
    with path.open("rb") as file:
        try:
            return frozenset(
                _read(file, name).decode()
                for graph in _fields(file, (0, file.seek(0, 2)), _GRAPH)
                for node in _fields(file, graph, _NODE)
                for name in _fields(file, node, _OPERATOR)
            )
        except ValueError:
            return frozenset()


def _has(file: BinaryIO, message: _Span, path: Sequence[int]) -> bool:
    """Whether there is what `path`, of numbers of fields, leads to in `message`."""
    return not path or any(_has(file, one, path[1:]) for one in _fields(file, message, path[0]))


def _fields(file: BinaryIO, message: _Span, wanted: int) -> Iterator[_Span]:
    """Where the contents of those of a message's fields lie that have the number `wanted` and a length. ValueError for
    what is no message."""
    at, end = message
    while at < end:
        file.seek(at)
        number, kind = divmod(_varint(file), 8)
        if kind == 0:
            _varint(file)
        size = {0: 0, 1: 8, 5: 4}.get(kind)
        if size is None:
            size = _varint(file) if kind == 2 else end
        at = file.tell() + size
        if at > end:
            raise ValueError("no message")
        if kind == 2 and number == wanted:
            yield at - size, at


def _varint(file: BinaryIO) -> int:
    value = shift = 0
    while shift < 64:
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
        shift += 7
    raise ValueError("no number")


def _read(file: BinaryIO, span: _Span) -> bytes:
    file.seek(span[0])
    return file.read(span[1] - span[0])
