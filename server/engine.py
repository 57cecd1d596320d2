"""The engine as a library: models in an application's own process, batched as the server batches them.

Lives here: how an application starts and ends it, and its requests. Must not: load or batch in another way than a
server does. A request is an `InnerRequest`, so it has all that others have: checks, lanes, padding, isolation, limits,
statistics.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Thread
from time import monotonic_ns
from types import TracebackType
from typing import Self, TypedDict, TypeVar, Unpack

import numpy.typing as npt

from paceline.backends.base import Backend
from paceline.backends.python.loaded_model import as_array
from paceline.backends.spec import Array
from paceline.clients.base import bounded_s
from paceline.clients.casting import cast, to_array
from paceline.clients.description import ModelDescription, described, metadata_of
from paceline.clients.errors import InferenceError, inference_error, no_answer
from paceline.clients.messages import checked_text, name_list
from paceline.protos.datatypes import by_name
from paceline.scheduler.policy import NEVER
from paceline.server.app import Server
from paceline.server.codec.array_request import ArrayAnswer
from paceline.server.engine_settings import EngineSettings, refuse_unknown, settings_of
from paceline.server.errors import NotSupported, ServerError
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.in_flight import failure_of
from paceline.server.requests.inner_request import InnerRequest, array_request
from paceline.server.requests.open_flight import PartialAnswer
from paceline.server.tuning import new_loop

__all__ = ["Asked", "BlockingEngine", "Engine", "EngineSettings"]

T = TypeVar("T")
Inputs = Mapping[str, npt.ArrayLike]

_END_S = 30.0
"""How long accepted requests may take at the end."""


class Asked(TypedDict, total=False):
    """What a request may say besides its inputs. `model`: may be left out if there is only one. `version`: by default
    the latest. `outputs`: the names of those wanted; all if there are none. `parameters`: what clients may send, such
    as "priority", "sequence_id" or "max_tokens". `timeout_s`: raise DeadlineExceeded after this."""

    model: str
    version: str
    outputs: Sequence[str]
    parameters: Mapping[str, bool | int | float | str]
    request_id: str
    timeout_s: float | None


class Engine:
    """Models in this process, for asyncio:

        async with Engine("model.onnx") as engine:
            result = await engine.infer({"x": array})

    `paths` are model repositories in Triton's layout, models' folders, or `.onnx` files. All models are loaded and
    warm when the block begins; otherwise it raises StartError with what is wrong. At its end, accepted requests are
    answered first. Everything else is used inside of it, on one event loop. Requests that wait at the same time share
    batches, whoever makes them.
    """

    def __init__(
        self,
        *paths: str | os.PathLike[str],
        backend_of: Callable[[str], Backend] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """`backend_of` gives backends by name, in place of the built-in ones. Raises TypeError and ValueError for
        settings that can't be used, or that there aren't."""
        if not callable(backend_of) and backend_of is not None:
            raise TypeError(f"backend_of: expected a function, got {backend_of!r}")
        self._settings = settings_of(paths, settings)
        self._backend_of = backend_of
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        if self._server is not None:
            raise RuntimeError("expected an engine that isn't running: this one has been started already")
        server = Server(self._settings, self._backend_of)
        try:
            await server.load()
            server.judge_loads()
        except BaseException:
            await server.unload(0)
            raise
        server.inference.serving = True
        self._server, self._loop = server, asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        server, self._server = self._running, None
        for model in server.repository.models:
            model.batcher.take_announced()
        server.inference.serving = False
        await server.unload(_END_S)

    @property
    def models(self) -> list[str]:
        """Their names."""
        return sorted({model.name for model in self._running.repository.models})

    def describe(self, model: str = "", version: str = "") -> ModelDescription:
        """What a model takes and gives, and how it is batched. Raises NotFound."""
        served = self.find(model, version)
        return described(metadata_of(served.config, [served.version]), served.config)

    async def infer(self, inputs: Inputs, **asked: Unpack[Asked]) -> ArrayAnswer:
        """Ask a model. `inputs` are arrays by name, or what numpy makes arrays of, with the batch axis if the model has
        one. They are converted to its datatypes if no value is lost by that, and mustn't be changed before this
        returns: an array of the right datatype isn't copied.

        Returns a dict of outputs by name, with the model's own `parameters`, if it adds any. Outputs may be views of
        what their whole batch has left; copy what is kept for long. Texts are `bytes` in arrays of objects.

        Raises InferenceError, of the same classes as a client does, and ValueError or TypeError for values that can't
        be converted and arguments of other types. Cancelling it withdraws the request.
        """
        served = self.find(asked.get("model", ""), asked.get("version", ""))
        inference = self._running.inference  # also while the engine ends
        if served.decoupled:
            what = f"model '{served.name}' may answer more than once: expected stream, got infer"
            raise _error(NotSupported(what), served.name)
        answered: asyncio.Future[ArrayAnswer] = asyncio.get_running_loop().create_future()

        def on_end(request: InnerRequest) -> None:
            if not answered.done():
                if request.error is None:
                    answered.set_result(request.outputs)
                else:
                    answered.set_exception(_error(request.error, served.name))

        request = self.announce(served, inputs, asked, on_end)
        try:
            return await _within(answered, asked.get("timeout_s"))
        finally:
            if not request.ended:
                inference.give_up(request)

    async def stream(self, inputs: Inputs, **asked: Unpack[Asked]) -> AsyncGenerator[ArrayAnswer, None]:
        """The same for models that may answer more than once, such as decoders: yields each answer as it comes. An
        error ends it. Closing it, as `contextlib.aclosing` does, withdraws the request. A model waits while too many
        of its answers haven't been taken."""
        served = self.find(asked.get("model", ""), asked.get("version", ""))
        inference = self._running.inference  # also while the engine ends
        answers: asyncio.Queue[tuple[PartialAnswer | None, ArrayAnswer | InferenceError]] = asyncio.Queue()

        def on_next(_: InnerRequest, answer: PartialAnswer, error: Exception | None) -> None:
            answers.put_nowait((answer, answer.outputs if error is None else _error(error, served.name)))

        def on_end(request: InnerRequest) -> None:
            answers.put_nowait((None, request.outputs if request.error is None else _error(request.error, served.name)))

        request = self.announce(served, inputs, asked, on_end, on_next)
        ends_ns, timeout_s = request.deadline_ns, asked.get("timeout_s")
        try:
            while True:
                left_s = None if ends_ns >= NEVER else max(0.0, (ends_ns - monotonic_ns()) / 1e9)
                answer, outputs = await _within(answers.get(), left_s, of_s=timeout_s)
                if isinstance(outputs, InferenceError):
                    raise outputs
                if outputs or answer is not None or not served.decoupled:
                    yield outputs
                if answer is None:
                    return
                answer.sent(sum(array.nbytes for array in outputs.values()))
        finally:
            if not request.ended:
                inference.give_up(request)

    @property
    def _running(self) -> Server:
        if self._server is None:
            raise RuntimeError("expected a running engine: use it inside of `async with Engine(…) as engine:`")
        return self._server

    def find(self, model: str, version: str) -> ServedModel:
        """What serves a model: for tools that stand on this engine. Raises NotFound, TypeError, and ValueError if it
        isn't said which of several."""
        repository = self._running.repository
        checked_text("version", version)
        if not checked_text("model", model):
            if len(self.models) != 1:
                raise ValueError(f"expected model=, as there are several: {', '.join(self.models)}")
            (model,) = self.models
        try:
            return repository.get(model, version)
        except ServerError as error:
            raise _error(error, model) from None

    def announce(
        self,
        served: ServedModel,
        inputs: Inputs,
        asked: Asked,
        on_end: Callable[[InnerRequest], None],
        on_next: Callable[[InnerRequest, PartialAnswer, Exception | None], None] | None = None,
    ) -> InnerRequest:
        """Start a request: for tools that stand on this engine. Raises what is wrong with it before it is one."""
        if asyncio.get_running_loop() is not self._loop:  # nothing would wake whoever waits there
            raise RuntimeError(
                "expected the event loop on which the engine was started; BlockingEngine is for all threads"
            )
        if not asked.keys() <= Asked.__optional_keys__:
            refuse_unknown("argument", asked, Asked.__optional_keys__)
        parameters = asked.get("parameters", {})
        for argument, values in (("inputs", inputs), ("parameters", parameters)):
            if not isinstance(values, Mapping):
                raise TypeError(f"{argument}: expected a mapping by name, got {type(values).__name__}")
        own = {tensor.name: tensor.datatype for tensor in served.spec.inputs}
        arrays = {name: _converted(name, value, own.get(name, "")) for name, value in inputs.items()}
        timeout_s = bounded_s(asked.get("timeout_s"))
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"expected a timeout_s above 0, got {timeout_s}")
        try:
            message = array_request(
                served,
                arrays,
                version=served.version,
                outputs=name_list("outputs", asked.get("outputs", ())),
                id=asked.get("request_id", ""),
                parameters=parameters,
            )
        except ServerError as error:
            raise _error(error, served.name) from None
        deadline_ns = NEVER if timeout_s is None else monotonic_ns() + int(timeout_s * 1e9)
        request = InnerRequest(message, on_end, deadline_ns=deadline_ns, on_next=on_next)
        self._running.inference.announce_to(served, request)
        return request


class BlockingEngine:
    """The same for threads, of which any may use it; each request blocks its own:

    with BlockingEngine("model.onnx") as engine:
        result = engine.infer({"x": array})
    """

    def __init__(
        self,
        *paths: str | os.PathLike[str],
        backend_of: Callable[[str], Backend] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self._engine = Engine(*paths, backend_of=backend_of, **settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._when_closed = ExitStack()

    def __enter__(self) -> Self:
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("expected an engine that isn't running: this one has been started already")
        with ExitStack() as undo:
            self._loop, self._process = _loop_on_a_thread(undo), os.getpid()
            self._do(self._engine.__aenter__())
            self._when_closed = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._when_closed:
            self._do(self._engine.__aexit__(kind, error, where))

    @property
    def models(self) -> list[str]:
        """Their names."""
        return self._engine.models

    def describe(self, model: str = "", version: str = "") -> ModelDescription:
        """As `Engine.describe`."""
        return self._engine.describe(model, version)

    def infer(self, inputs: Inputs, **asked: Unpack[Asked]) -> ArrayAnswer:
        """As `Engine.infer`."""
        return self._do(self._engine.infer(inputs, **asked))

    def stream(self, inputs: Inputs, **asked: Unpack[Asked]) -> Generator[ArrayAnswer, None, None]:
        """As `Engine.stream`."""
        answers = self._engine.stream(inputs, **asked)

        async def following() -> ArrayAnswer | None:
            return await anext(answers, None)

        try:
            while (answer := self._do(following())) is not None:
                yield answer
        finally:
            # Not waited for: a garbage collection may end this, on any thread, also that of the engine.
            if (loop := self._loop) is not None:
                with suppress(RuntimeError):  # the engine has ended, and so have all of its streams
                    loop.call_soon_threadsafe(lambda: loop.create_task(answers.aclose()))

    def _do(self, what: Coroutine[object, object, T]) -> T:
        if self._loop is None or self._loop.is_closed():
            what.close()
            raise RuntimeError("expected a running engine: use it inside of `with BlockingEngine(…) as engine:`")
        if os.getpid() != self._process:  # a fork has no threads of its parent's
            what.close()
            raise RuntimeError("expected the process that started the engine: start one of its own in a forked process")
        future = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted


def _loop_on_a_thread(undo: ExitStack) -> asyncio.AbstractEventLoop:
    """An event loop that runs until `undo`."""
    runner = asyncio.Runner(loop_factory=new_loop)
    loop = runner.get_loop()

    def run() -> None:
        with runner:
            loop.run_forever()

    thread = Thread(target=run, name="paceline engine", daemon=True)
    thread.start()
    undo.callback(thread.join)
    undo.callback(loop.call_soon_threadsafe, loop.stop)
    return loop


async def _within(what: Awaitable[T], timeout_s: float | None, *, of_s: float | None = None) -> T:
    """Raises DeadlineExceeded. `of_s`: the timeout of which this is what was left."""
    try:
        async with asyncio.timeout(timeout_s):
            return await what
    except TimeoutError:
        raise no_answer(of_s or timeout_s or 0) from None


def _converted(name: str, value: npt.ArrayLike, datatype: str) -> Array:
    """`value` in the datatype of input `name`, if the model has one of that name. Raises ValueError and TypeError."""
    if datatype == "BYTES":
        return as_array(name, value, "input")
    try:
        array = to_array(value)
        return cast(array, by_name(datatype)) if datatype else array
    except (ValueError, TypeError) as error:
        raise type(error)(f"input '{name}': {error}") from None


def _error(error: BaseException, model: str) -> InferenceError:
    return inference_error(*failure_of(error, model, f"a request to model '{model}'"))
