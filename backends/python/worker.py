"""What runs in the process of a Python model: its class is loaded, gets batches, and is closed.

Lives here: everything on that side, and what the two sides say to each other: the server asks, the worker answers, over
a `BlockingLink`. Must not: import more of this product than `backends.spec` and `backends.transport`, or any package
besides numpy, since the interpreter may be another one. The rule: the process ends with the server, whatever the model
is doing at the time.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import importlib.util
import inspect
import operator
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.link import RemoteEnd
from paceline.backends.transport.parcel import Message

START = 1
"""From the server, first: the model's name, the path of its file, the device's kind and index, its parameters as pairs.
Answered by READY or FAILED."""

READY = 2
"""Inputs and outputs: `Declared`, or None if the class leaves them to the configuration."""

RUN = 3
"""From the server: a parcel of arrays, their names, the names of the wanted outputs. Answered by DONE or FAILED."""

DONE = 4
"""A parcel of outputs, in the order of the request."""

FAILED = 5
"""The reason, in one line, and the name of its class in `backends.errors`."""

CLOSE = 6
"""From the server, last. The answer is the end of the process."""

ASK = 7
"""From the server, to a model that is part of it, whose class has a method `answer`: bytes. Answered by ANSWERED or
FAILED. Callers' data, which is only in RUN, can't be mistaken for it."""

ANSWERED = 8
"""Bytes: what `answer` returned."""

TRY = 9
"""As RUN, but what the model raises isn't printed."""

Declared: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and dims of each tensor."""


_CLASS = "Model"
_TRITONS = "TritonPythonModel"
_TRITONS_MODULE = "triton_python_backend_utils"
_ERRORS = "paceline.backends.errors"
"""Code that raises one of these knows what it means, and to whom: it needs no traceback."""
_EXECUTION_ERROR, _OUT_OF_MEMORY = "ExecutionError", "OutOfMemory"
_MAX_TEXT_CHARACTERS, _MAX_TRACEBACK_CHARACTERS = 4_000, 32_000
"""In characters: of what the server is told about an error, and of what goes to its log."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a model's `load` gets. `folder` is that of its `model.py`, `device` is "cpu" or "gpu", `device_index` counts
    GPUs, `parameters` are those of its configuration."""

    name: str
    folder: Path
    device: str = "cpu"
    device_index: int = 0
    parameters: Mapping[str, str] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> None:
    """Serve a model over the three descriptors that `arguments` begin with, until told to close."""
    faulthandler.enable()
    _end_with_the_server()
    _leave_signals_to_the_server()
    end, own, other = map(int, arguments[:3])
    link = BlockingLink.join(RemoteEnd(end, own, other))
    start = link.receive()
    if start is None:
        return
    own = os.getpid()
    try:
        model = _Model(*start[1:])
        _end_unless(own)
    except BaseException as error:  # noqa: BLE001 - a model's file may raise SystemExit; the server needs the reason
        _end_unless(own, error)
        _print(error)
        where = f" (its interpreter is {sys.executable})" if isinstance(error, ModuleNotFoundError) else ""
        link.send(FAILED, f"{_in_one_line(error)}{where}", _EXECUTION_ERROR)
        return
    link.send(READY, model.inputs, model.outputs)
    while (message := link.receive()) is not None:
        if message[0] == CLOSE:
            model.close()
            return
        model.prints_errors = message[0] != TRY
        try:
            link.send(*_answer(model, own, link, message))
        except ValueError as error:  # of tensors beyond what memory and messages hold
            link.send(FAILED, f"outputs can't be handed to the server: {error}", _EXECUTION_ERROR)


def _answer(model: _Model, own: int, link: BlockingLink, message: Message) -> Message:
    """The answer to `message`. When this returns, nothing here holds the arrays any more, so the answer can say so."""
    try:
        if message[0] == ASK:
            return ANSWERED, model.answer(message[1])
        _, parcel, names, wanted = message
        arrays = link.unpack(parcel)
        given = {name: array for name, array in zip(names, arrays, strict=True) if array is not MISSING}
        outputs = model.execute(given)
        _end_unless(own)
        return DONE, link.pack(_in_order(outputs, wanted))
    except BaseException as error:  # noqa: BLE001 - the model's, such as a Rust panic; passed to the server
        return _failure(model, own, error)


def _failure(model: _Model, own: int, error: BaseException) -> Message:
    """The answer that says what the model raised. Raises `error` again if it is to end the process."""
    _end_unless(own, error)
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        raise error
    if type(error).__module__ == _ERRORS:
        return FAILED, " ".join(_cut(str(error), _MAX_TEXT_CHARACTERS).split()), type(error).__name__
    model.tell(error)
    return FAILED, _in_one_line(error), _OUT_OF_MEMORY if isinstance(error, MemoryError) else _EXECUTION_ERROR


def _end_unless(own: int, error: BaseException | None = None) -> None:
    """End this process if it is a fork of process `own` that returns from the model's code, by `error` or normally. It
    shares the link and the memory: its answer would be taken for the answer to the next batch, whoever asked for
    that."""
    if os.getpid() == own:
        return
    if isinstance(error, SystemExit):
        raise error
    _print(error or RuntimeError("a fork of the model's process returned from the model's code; it exits"))
    os._exit(1)


class _Model:
    """The instance of a model's class."""

    def __init__(
        self, name: str, path: str, device: str, device_index: int, parameters: Sequence[tuple[str, str]]
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._logged_at: object = None
        self.prints_errors = True
        kind = _class_in(Path(path))
        self.inputs, self.outputs = _declared(kind, "inputs"), _declared(kind, "outputs")
        self._model = kind()
        if (load := getattr(self._model, "load", None)) is not None:
            self._result(load(Context(name, Path(path).parent, device, device_index, dict(parameters))))

    def execute(self, inputs: dict[str, Array]) -> object:
        return self._result(self._model.execute(inputs))

    def answer(self, question: bytes) -> bytes:
        answer: bytes = self._model.answer(question)
        return answer

    def close(self) -> None:
        try:
            if (close := getattr(self._model, "close", None)) is not None:
                self._result(close())
        except Exception as error:  # noqa: BLE001 - the model's; there is no caller to pass it to
            _print(error)
        if self._loop is not None:
            self._loop.close()

    def tell(self, error: BaseException) -> None:
        """Log `error`, unless it comes from the same place as the last one: a failed batch is run again in halves."""
        if not self.prints_errors:
            return
        where = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
        if where != self._logged_at:
            self._logged_at = where
            _print(error)

    def _result(self, value: object) -> object:
        """`value`, or its result if it is awaitable. One loop for all, so that what is bound to it stays usable."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(value)


def _class_in(path: Path) -> type:
    """The class in the file at `path`, which may import what lies next to it."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a Python file, got {path.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    tritons = f"Triton's {_TRITONS}, which gets requests and not batches"
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name != _TRITONS_MODULE:
            raise
        got = f"an import of {_TRITONS_MODULE}, as of {tritons}"
        raise AttributeError(f"expected a class {_CLASS} in {path.name}, got {got}") from None
    kind = getattr(module, _CLASS, None)
    if not isinstance(kind, type):
        got = tritons if hasattr(module, _TRITONS) else "none"
        raise AttributeError(f"expected a class {_CLASS} in {path.name}, got {got}")
    if not callable(getattr(kind, "execute", None)):
        raise AttributeError(f"expected a method execute(self, inputs) of class {_CLASS} in {path.name}, got none")
    return kind


def _declared(kind: type, attribute: str) -> Declared | None:
    """What the class declares of its inputs or outputs, as plain tuples."""
    tensors = getattr(kind, attribute, None)
    if tensors is None:
        return None
    try:
        return tuple(
            (str(name), str(datatype), tuple(map(operator.index, dims))) for name, (datatype, dims) in tensors.items()
        )
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f'{_CLASS}.{attribute}: expected a dict such as {{"x": ("FP32", [-1, 4])}}, got {tensors!r}'
        ) from None


def _in_order(outputs: object, wanted: Sequence[str]) -> list[Array]:
    if not isinstance(outputs, Mapping):
        raise TypeError(f"execute: expected a dict of outputs by name, got {type(outputs).__name__}")
    missing = [name for name in wanted if name not in outputs]
    if missing:
        raise KeyError(f"execute: expected output '{missing[0]}', got only {list(outputs)}")
    return [_array(name, outputs[name]) for name in wanted]


def _array(name: str, value: object) -> Array:
    """`value` as an array of numbers or of `bytes`; text is encoded."""
    array: Array = np.asarray(value)
    if array.dtype.kind == "b":
        # An array made over other bytes may have some that are neither 0 nor 1, which aren't valid as BOOL.
        whole: Array = array.view(np.uint8) != 0
        return whole
    if array.dtype.kind not in "USOT":
        return array
    if array is not value:
        # A list of text: in an array made directly from it, elements would lose NULs at their ends.
        array = np.array(value, object)
    elements = [item.encode() if isinstance(item, str) else item for item in array.ravel().tolist()]
    for item in elements:
        if not isinstance(item, bytes):
            raise TypeError(f"output '{name}': expected numbers of one datatype, or bytes, got {type(item).__name__}")
    made: Array = np.empty(len(elements), object)
    made[:] = elements
    return made.reshape(array.shape)


def _print(error: BaseException) -> None:
    """Print `error` to the server's log, with its traceback."""
    with suppress(OSError, ValueError):  # a model may have closed it
        print(_cut("".join(traceback.format_exception(error)), _MAX_TRACEBACK_CHARACTERS), end="", file=sys.stderr)


def _in_one_line(error: BaseException) -> str:
    try:
        # The str of a KeyError is the repr of its text.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    except BaseException:  # noqa: BLE001 - the model's own __str__; the callers must get an answer
        text = ""
    return ": ".join(filter(None, (type(error).__name__, " ".join(_cut(text, _MAX_TEXT_CHARACTERS).split()))))


def _cut(text: str, most: int) -> str:
    """`text`, without its middle if it is too long: some errors have whole tensors in their messages."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-(most // 2) :]}"


def _end_with_the_server() -> None:
    """Kill this process and what it has started as soon as stdin ends, whose other end the server has."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if hasattr(fcntl, "F_SETSIG"):
        # The kernel does it, even if native code of the model never releases the GIL.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _leave_signals_to_the_server() -> None:
    """Ignore signals that stop a whole process group: they are for the server, which answers what it has accepted
    before it ends this process. Handlers rather than SIG_IGN: programs that the model starts don't inherit them, and
    its forks get the defaults back."""

    def handle_by(handler: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)

    handle_by(lambda *_: None)
    os.register_at_fork(after_in_child=lambda: handle_by(signal.SIG_DFL))
