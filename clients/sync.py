"""The blocking client. Thread-safe: one client serves many threads over one connection.

Lives here: opening a channel of grpc, calling, closing. What is sent and read is in base.py and messages.py, the
asyncio twin in aio.py; the two have the same methods with the same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from types import ModuleType
from typing import ClassVar, Self, TypeVar

import grpc
import numpy.typing as npt

from paceline.clients import base
from paceline.clients.answers import Answers
from paceline.clients.base import BaseClient, Call, ReadyWait, Timeout
from paceline.clients.connection import Metadata
from paceline.clients.description import ModelDescription, described
from paceline.clients.errors import DeadlineExceeded, InferenceError, Unavailable, Unimplemented, rpc_failure
from paceline.clients.generations import GenerationChunk, GenerationParameter, generation_chunk, generation_request
from paceline.clients.messages import (
    IndexEntry,
    InferResult,
    Inputs,
    ModelMetadata,
    Parameters,
    ServerMetadata,
    infer_request,
    infer_result,
    plain_inputs,
)
from paceline.clients.sequences import InferenceSequence, SequenceId
from paceline.protos.inference_pb2 import ModelInferRequest
from paceline.protos.model_config_pb2 import ModelConfig

__all__ = ["InferenceClient"]

T = TypeVar("T")


class InferenceClient(BaseClient):
    """Calls a server of the Open Inference Protocol (KServe v2) over gRPC and waits for the answer.

    The constructor's arguments are those of `BaseClient`. Every method raises `clients.errors.InferenceError` or a
    subclass when the call ends with a status other than OK, ResponseError when the answer contradicts the protocol, and
    ClientClosed after close(). On every method, `timeout_s` is in seconds: None means no timeout, left out it is the
    client's own, and 0 or less ends the call with DeadlineExceeded at once. `metadata` is sent in addition to the
    client's own.
    """

    _transport: ClassVar[ModuleType] = grpc

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        request_id: str = "",
        parameters: Parameters | None = None,
        timeout_s: Timeout = ...,
        metadata: Metadata = (),
        datatypes: Mapping[str, str] | None = None,
    ) -> InferResult:
        """Runs the model and returns its outputs.

        Inputs, datatypes and parameters are as in `clients.messages.infer_request`, which also says what is refused
        with ValueError or TypeError before anything is sent. Python's numbers, alone or in lists, are sent in the
        datatypes of the model's inputs, or refused with ValueError if a value would be lost. For that, the first such
        call asks for the model's metadata, within the same timeout, and raises what that raises. With an empty
        `version`, the server chooses; with empty `outputs`, it returns all.
        """
        request, timeout_s = self._request(
            model, inputs, version, outputs, request_id, parameters, timeout_s, metadata, datatypes
        )
        try:
            return self._call(base.infer_call(request), timeout_s, metadata)
        except InferenceError as error:
            self._forget_datatypes(model, version, error)
            raise

    def stream_infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        request_id: str = "",
        parameters: Parameters | None = None,
        timeout_s: Timeout = ...,
        metadata: Metadata = (),
        datatypes: Mapping[str, str] | None = None,
    ) -> Generator[InferResult, None, None]:
        """Runs a model that may answer any number of times, and yields each answer as it comes. Arguments are as in
        `infer`; the request is sent when the first answer is asked for.

        Works for each model of a server with ModelStreamInfer, also for those that answer once. `timeout_s` is for all
        answers together; None lets them take any time. At most one answer waits here to be asked for: behind it, gRPC
        makes the server wait. Closing the iterator, or dropping it, cancels the request. An error among the answers
        ends it too: InferenceError, whose status other servers than paceline leave UNKNOWN. Raises Unavailable if the
        server ends the stream before it has said that there are no more answers.
        """
        request, timeout_s = self._request(
            model, inputs, version, outputs, request_id, parameters, timeout_s, metadata, datatypes
        )
        answers = Answers()
        call = base.stream_infer_call(request, answers)
        try:
            stream = self._start(call, timeout_s, metadata)
            try:
                for message in stream:
                    response = call.read(message)
                    if response is not None:
                        yield infer_result(response)
                answers.end()
            except grpc.RpcError as error:
                raise rpc_failure(error) from error
            finally:
                stream.cancel()
        except InferenceError as error:
            self._forget_datatypes(model, version, error)
            raise

    def generate(
        self,
        model: str,
        prompt: str | npt.ArrayLike,
        *,
        version: str = "",
        request_id: str = "",
        timeout_s: Timeout = ...,
        metadata: Metadata = (),
        **parameters: GenerationParameter,
    ) -> Generator[GenerationChunk, None, None]:
        """Generates what follows `prompt`, text or token ids, and yields each token as it comes, or what the server
        sends at once. The last chunk has a `finish_reason`.

        Other keywords are parameters: `max_tokens`, `min_tokens`, `temperature`, `top_k`, `top_p`, `seed`, `stop` (text
        or several), `repetition_penalty`, `logprobs`, and whatever else the model knows. One that is named as an input
        of the model is sent as that. If the model has the input `sampling_parameters`, as that of Triton's vLLM
        backend, the others are sent there, as a JSON object; else as parameters of the request, which `priority`,
        `timeout` (of the server, in microseconds) and those that begin with `paceline_` are in any case. The first call
        asks for the model's inputs, within the same timeout. Otherwise as `stream_infer`: `timeout_s` is for the whole
        answer, and closing the iterator, or dropping it, ends the generation.
        """
        began_s = time.monotonic()
        known = self._datatypes_of(model, version, timeout_s, metadata)
        request = generation_request(prompt, parameters, known)
        left_s = self._left_s(timeout_s, time.monotonic() - began_s)
        given = {"version": version, "request_id": request_id, "metadata": metadata, **request._asdict()}
        results = self.stream_infer(model, timeout_s=left_s, **given)
        with closing(results):
            for result in results:
                yield generation_chunk(result)

    def sequence(
        self,
        model: str,
        id: SequenceId | None = None,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Parameters | None = None,
        metadata: Metadata = (),
    ) -> InferenceSequence:
        """A sequence of requests that share state in the server, as a context: `with client.sequence("m") as sequence:`
        and then `sequence.infer(inputs)` for each step, with `last=True` for the last one. See `InferenceSequence`.

        `id` is an integer or text that no other client uses at the same time; by default, the client takes a fresh
        integer. The other arguments are those of each step's `infer`. Nothing is sent before the first step.
        """
        infer = partial(self.infer, model, version=version, outputs=outputs, metadata=metadata)
        return InferenceSequence(infer, self._bound_s, next(self._sequence_ids) if id is None else id, parameters)

    def server_live(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
        """Whether the server says it is alive."""
        return self._call(base.SERVER_LIVE, timeout_s, metadata)

    def server_ready(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
        """Whether the server says it can take requests for its models."""
        return self._call(base.SERVER_READY, timeout_s, metadata)

    def model_ready(self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> bool:
        """Whether the model can take requests. For unknown models, some servers answer False, others raise NotFound."""
        return self._call(base.model_ready_call(model, version), timeout_s, metadata)

    def server_metadata(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> ServerMetadata:
        """The server's name, version and protocol extensions."""
        return self._call(base.SERVER_METADATA, timeout_s, metadata)

    def model_metadata(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> ModelMetadata:
        """The model's versions, platform, inputs and outputs."""
        return self._call(base.model_metadata_call(model, version), timeout_s, metadata)

    def model_config(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> ModelConfig:
        """How the model is served: Triton's message, with nothing left open. Not all servers have this extension."""
        return self._call(base.model_config_call(model, version), timeout_s, metadata)

    def describe(
        self, model: str, version: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> ModelDescription:
        """What the model takes and returns, how it is batched, where it runs and, of a pipeline, its steps. Makes two
        calls within one timeout; of a server without ModelConfig it tells only what the first says."""
        began_s = time.monotonic()
        about = self.model_metadata(model, version, timeout_s=timeout_s, metadata=metadata)
        timeout_s = self._left_s(timeout_s, time.monotonic() - began_s)
        try:
            config = self.model_config(model, version, timeout_s=timeout_s, metadata=metadata)
        except Unimplemented:
            return described(about, None)
        return described(about, config)

    def models(
        self, *, ready_only: bool = False, timeout_s: Timeout = ..., metadata: Metadata = ()
    ) -> tuple[IndexEntry, ...]:
        """The state of each version of each model, in order; with `ready_only`, of those that serve. Not all servers
        have this extension of Triton's."""
        return self._call(base.models_call(ready_only), timeout_s, metadata)

    def repository_index(self, *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> tuple[IndexEntry, ...]:
        """The same as `models`, in the server's own order."""
        return self._call(base.REPOSITORY_INDEX, timeout_s, metadata)

    def health(self, service: str = "", *, timeout_s: Timeout = ..., metadata: Metadata = ()) -> str:
        """The name of a grpc.health.v1 status, such as SERVING. Raises NotFound for an unknown service."""
        return self._call(base.health_call(service), timeout_s, metadata)

    def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server is reachable and ready. Raises DeadlineExceeded after `timeout_s` seconds.

        Asks again after UNAVAILABLE, DEADLINE_EXCEEDED and "not ready", with pauses of 50 ms to 1 s; other errors are
        raised.
        """
        wait = ReadyWait(self._target, timeout_s, time.monotonic())
        while True:
            with suppress(DeadlineExceeded, Unavailable):
                if self._call(base.SERVER_READY_ONCE_CONNECTED, wait.left_s(time.monotonic()), ()):
                    return
            time.sleep(wait.pause_s(time.monotonic()))

    def close(self) -> None:
        """Ends the connection; calls still in flight raise Cancelled. Closing twice does nothing."""
        channel = self._detach()
        if channel is not None:
            channel.close()

    def _datatypes_of(self, model: str, version: str, timeout_s: Timeout, metadata: Metadata) -> Mapping[str, str]:
        """Of the model's inputs, by name."""
        known = self._datatypes.get((model, version))
        if known is None:
            described = self.model_metadata(model, version, timeout_s=timeout_s, metadata=metadata)
            known = self._datatypes[model, version] = {tensor.name: tensor.datatype for tensor in described.inputs}
        return known

    def _request(
        self,
        model: str,
        inputs: Inputs,
        version: str,
        outputs: Sequence[str],
        request_id: str,
        parameters: Parameters | None,
        timeout_s: Timeout,
        metadata: Metadata,
        datatypes: Mapping[str, str] | None,
    ) -> tuple[ModelInferRequest, Timeout]:
        """The request for `infer`'s arguments, and what is left of the timeout."""
        if plain := plain_inputs(inputs, datatypes):
            began_s = time.monotonic()
            known = self._datatypes_of(model, version, timeout_s, metadata)
            datatypes = {**{name: known[name] for name in plain if name in known}, **(datatypes or {})}
            timeout_s = self._left_s(timeout_s, time.monotonic() - began_s)
        request = infer_request(
            model,
            inputs,
            version=version,
            outputs=outputs,
            request_id=request_id,
            parameters=parameters,
            datatypes=datatypes,
        )
        return request, timeout_s

    def _call(self, call: Call[T], timeout_s: Timeout, metadata: Metadata) -> T:
        try:
            response = self._start(call, timeout_s, metadata)
        except grpc.RpcError as error:
            raise rpc_failure(error) from error
        return call.read(response)
