"""A Python model in its process: its class, found in its file, and what it takes and gives.

Lives here: loading it, calling it, its outputs as arrays, and its errors as texts. Must not: import more of this
product than `backends.spec` and `backends.transport`, or any package besides numpy, since the interpreter may be
another one; or say anything to the server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import operator
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.backends.python.messages import ANSWERED, ASK, DONE, FAILED, Declared
from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.parcel import Message

T = TypeVar("T")

_CLASS, _MODELS = "Model", "models"
_ERRORS = "paceline.backends.errors"
"""Code that raises one of these knows what it means, and to whom: it needs no traceback."""
_FAULTS_OF_REQUESTS = frozenset(("INVALID_ARGUMENT", "OUT_OF_RANGE", "INTERNAL", "UNKNOWN"))
EXECUTION_ERROR, OUT_OF_MEMORY, UNFIT_OUTPUTS = "ExecutionError", "OutOfMemory", "UnfitOutputs"
_MAX_TEXT_CHARACTERS, _MAX_TRACEBACK_CHARACTERS = 4_000, 32_000
"""In characters: of what the server is told about an error, and of what goes to its log."""


class CallFailed(Exception):
    """A call of another model has failed. `status` is the name of the gRPC status that a client would get, such as
    NOT_FOUND."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class UnfitAnswer(TypeError):
    """What the model has returned isn't what it should be, as the text says; who gets that needn't know the type."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a model's `load` gets. `folder` is that of its `model.py`, `device` is "cpu" or "gpu", `device_index` counts
    GPUs, `parameters` are those of its configuration."""

    name: str
    folder: Path
    device: str = "cpu"
    device_index: int = 0
    parameters: Mapping[str, str] = field(default_factory=dict)


class RunningModel(ABC):
    """What a model's process does with whatever class the model has: it runs its methods, which may be coroutines, and
    tells of what they raise."""

    @abstractmethod
    def answered(self, link: BlockingLink, message: Message) -> Message:
        """Call the model with what `message` brings. Returns what to tell the server: what the model has returned, or
        what it raised."""

    @abstractmethod
    def sequences_over(self, over: Iterable[tuple[int | str | bytes, str]]) -> None:
        """Tell the model which sequences are over, and why, if it wants to know."""

    @abstractmethod
    def close(self) -> None: ...

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._logged_at: object = None
        self._pid = os.getpid()
        # Starts its thread when it has something to do.
        self._waiting = ThreadPoolExecutor(1, "waiting for the server")
        self.prints_errors = True

    def close_by(self, close: Callable[[], object] | None) -> None:
        """End: `close` is the model's own part of that, if it has one."""
        try:
            if close is not None:
                self.result(close())
        except Exception as error:  # noqa: BLE001 - the model's; there is no caller to pass it to
            print_error(error)
        if self._loop is not None:
            self._loop.close()

    def wait_for(self, get: Callable[[], T]) -> T:
        """What `get` returns, which may block; meanwhile, what the model has left on its event loop goes on."""
        if self._loop is None:
            return get()
        return self._loop.run_until_complete(self._loop.run_in_executor(self._waiting, get))

    def end_fork(self, error: BaseException | None = None) -> None:
        """As the function, if this isn't the process that has loaded the model."""
        end_fork(self._pid, error)

    def failure(self, error: BaseException) -> Message:
        """The message that says what the model raised. Raises `error` again if it is to end the process."""
        self.end_fork(error)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise error
        if type(error).__module__ == _ERRORS:
            return FAILED, " ".join(_cut(str(error), _MAX_TEXT_CHARACTERS).split()), type(error).__name__
        if isinstance(error, CallFailed):
            # Whose fault it is, the status says: maybe that of some request, or that of none.
            kind = "UpstreamRefused" if error.status in _FAULTS_OF_REQUESTS else "UpstreamFailed"
            return FAILED, " ".join(_cut(str(error), _MAX_TEXT_CHARACTERS).split()), kind, error.status
        self.tell(error)
        kinds = (MemoryError, OUT_OF_MEMORY), (UnfitAnswer, UNFIT_OUTPUTS), (BaseException, EXECUTION_ERROR)
        return FAILED, in_one_line(error), next(name for kind, name in kinds if isinstance(error, kind))

    def tell(self, error: BaseException) -> None:
        """Log `error`, unless it comes from the same place as the last one: a failed batch is run again in halves."""
        if not self.prints_errors:
            return
        where = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
        if where != self._logged_at:
            self._logged_at = where
            print_error(error)

    def result(self, value: object) -> object:
        """`value`, or its result if it is awaitable."""
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all, so that what is bound to it stays usable."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop


class LoadedModel(RunningModel):
    """The instance of a model's class."""

    def __init__(
        self,
        name: str,
        path: str,
        device: str,
        device_index: int,
        parameters: Sequence[tuple[str, str]],
        models: Mapping[str, object],
    ) -> None:
        super().__init__()
        sys.path.insert(0, str(Path(path).parent))  # it may import what lies next to it
        kind = class_in(Path(path), Path(path).stem, _CLASS, "inputs")
        self.inputs, self.outputs = _declared(kind, "inputs"), _declared(kind, "outputs")
        self._model = kind()
        _hand_models(self._model, models)
        if (load := getattr(self._model, "load", None)) is not None:
            self.result(load(Context(name, Path(path).parent, device, device_index, dict(parameters))))

    def execute(self, given: object) -> object:
        """What the model's `execute` returns for inputs by name, or for requests."""
        return self.result(self._model.execute(given))

    def answered(self, link: BlockingLink, message: Message) -> Message:
        """As above. When this returns, nothing here holds the arrays any more, so the answer can say so."""
        try:
            if message[0] == ASK:
                return ANSWERED, self._model.answer(message[1])
            _, parcel, names, wanted = message
            arrays = link.unpack(parcel)
            given = {name: array for name, array in zip(names, arrays, strict=True) if array is not MISSING}
            outputs = self.execute(given)
            self.end_fork()
            return DONE, link.pack(in_order(outputs, wanted))
        except BaseException as error:  # noqa: BLE001 - the model's, such as a Rust panic; passed to the server
            return self.failure(error)

    def sequences_over(self, over: Iterable[tuple[int | str | bytes, str]]) -> None:
        sequence_over = getattr(self._model, "sequence_over", None)
        for sequence, why in over:
            if sequence_over is None:
                return
            try:
                self.result(sequence_over(sequence, why))
            except Exception as error:  # noqa: BLE001 - the model's; there is no caller to pass it to
                print_error(error)

    def close(self) -> None:
        self.close_by(getattr(self._model, "close", None))


def class_in(path: Path, module_name: str, class_name: str, argument: str) -> type:
    """The class in the file at `path`, whose `execute` takes `argument`. The file becomes module `module_name`."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a Python file, got {path.name}")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        raise AttributeError(f"expected a class {_CLASS}, or Triton's TritonPythonModel, in {path.name}, got none")
    if not callable(getattr(kind, "execute", None)):
        method = f"execute(self, {argument}) of class {class_name}"
        raise AttributeError(f"expected a method {method} in {path.name}, got none")
    return kind


def _hand_models(model: object, models: Mapping[str, object]) -> None:
    """Give it the models that it may call, as an attribute. One that calls none may do as it likes with the name."""
    what = f"attribute '{_MODELS}' of class {_CLASS}, for the models that paceline.calls names"
    if hasattr(model, _MODELS):
        if models:
            raise AttributeError(f"{what}: expected none of the class's own, got one; give it another name")
        return
    try:
        setattr(model, _MODELS, models)
    except AttributeError as error:
        if models:
            raise AttributeError(f"{what}: expected that it can be set, got: {error}") from None


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


def in_order(outputs: object, wanted: Sequence[str]) -> list[Array]:
    if not isinstance(outputs, Mapping):
        raise UnfitAnswer(f"execute: expected a dict of outputs by name, got {type(outputs).__name__}")
    missing = [name for name in wanted if name not in outputs]
    if missing:
        raise UnfitAnswer(f"execute: expected output '{missing[0]}', got only {list(outputs)}")
    return [as_array(name, outputs[name]) for name in wanted]


def as_array(name: str, value: object, kind: str = "output") -> Array:
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
            what = f"expected numbers of one datatype, or bytes, got {type(item).__name__}"
            raise (UnfitAnswer if kind == "output" else TypeError)(f"{kind} '{name}': {what}")
    made: Array = np.empty(len(elements), object)
    made[:] = elements
    return made.reshape(array.shape)


def print_error(error: BaseException) -> None:
    """Print `error` to the server's log, with its traceback."""
    with suppress(OSError, ValueError):  # a model may have closed it
        print(_cut("".join(traceback.format_exception(error)), _MAX_TRACEBACK_CHARACTERS), end="", file=sys.stderr)


def in_one_line(error: BaseException) -> str:
    try:
        # The str of a KeyError is the repr of its text.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    except BaseException:  # noqa: BLE001 - the model's own __str__; the callers must get an answer
        text = ""
    kind = "" if isinstance(error, UnfitAnswer) else type(error).__name__
    return ": ".join(filter(None, (kind, " ".join(_cut(text, _MAX_TEXT_CHARACTERS).split()))))


def _cut(text: str, most: int) -> str:
    """`text`, without its middle if it is too long: some errors have whole tensors in their messages."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-(most // 2) :]}"


def end_fork(own: int, error: BaseException | None = None) -> None:
    """End this process if it is a fork of process `own` that returns from the model's code, by `error` or normally. It
    shares the link and the memory: its answer would be taken for the answer to the next batch, whoever asked for
    that."""
    if os.getpid() == own:
        return
    if isinstance(error, SystemExit):
        raise error
    print_error(error or RuntimeError("a fork of the model's process returned from the model's code; it exits"))
    os._exit(1)
