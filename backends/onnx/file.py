"""What an ONNX file says about its graph and ONNX Runtime doesn't: which inputs and outputs have a shape, and the types
of its nodes.

Lives here: as much of protobuf's wire format as that takes, without reading weights. Must not: onnxruntime, to which a
tensor without a shape, which may have any rank, looks like a scalar. Field numbers are those of `onnx.proto`. For files
of another format, some of which ONNX Runtime reads, the result is empty.
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
    """The names of the graph's inputs and outputs that have no shape. Blocks, for about a millisecond per thousand
    nodes; raises OSError."""
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
    """The types of the graph's nodes, except those in subgraphs of other nodes. Blocks, for some milliseconds per
    thousand nodes; raises OSError."""
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
    """Whether `message` contains the nested field that `path`, a sequence of field numbers, leads to."""
    return not path or any(_has(file, one, path[1:]) for one in _fields(file, message, path[0]))


def _fields(file: BinaryIO, message: _Span, wanted: int) -> Iterator[_Span]:
    """The spans of the contents of all length-delimited fields of `message` with the number `wanted`. ValueError if it
    isn't a message."""
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
