"""A Python model written for Triton, in its process: its class, found in its file, and what becomes of its requests.

Lives here: loading it, calling it, and what it returns. Must not: as `backends.python.worker`; say anything to the
server. The rules: what is wrong with one response fails its request alone; a request that `execute` neither answers nor
keeps ends when its model drops it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from paceline.backends.python.loaded_model import EXECUTION_ERROR, RunningModel, UnfitAnswer, class_in, in_one_line
from paceline.backends.python.messages import DONE, Ended
from paceline.backends.python.requests_worker import Desk, RequestState
from paceline.backends.python.triton.config import ModelConfig, using_decoupled_model_transaction_policy
from paceline.backends.python.triton.errors import error_kind
from paceline.backends.python.triton.module import install
from paceline.backends.python.triton.requests import (
    RELEASE_RESCHEDULE,
    SEQUENCE_END,
    SEQUENCE_START,
    InferenceRequest,
)
from paceline.backends.python.triton.responses import InferenceResponse, Received, outputs_of
from paceline.backends.python.triton.tensors import Tensor
from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.parcel import Message

__all__ = ["TritonModel"]


class TritonModel(RunningModel):
    """The instance of a model's class. `completed` is its configuration, as JSON, completed by the class if that can;
    `initialize` comes next."""

    def __init__(
        self,
        desk: Desk,
        name: str,
        path: str,
        device: str,
        device_index: int,
        parameters: Sequence[tuple[str, str]],
        called: Sequence[str],
        config: str,
        completes: bool,
        is_verbose: bool,
    ) -> None:
        super().__init__()
        desk.make_request = self.request
        self._name, self._path = name, Path(path)
        self._device, self._device_index = device, device_index
        install(str(self._path.parent), is_verbose=is_verbose)
        InferenceRequest.calls = desk.calls
        self._kind = _class_in(self._path)
        self.completed = _completed(self._kind, config) if completes else config
        self._background: set[asyncio.Task[object]] = set()

    def initialize(self, config: str, instance: str) -> TritonModel:
        """Make the instance, of this name. `config` is the model's whole configuration, as JSON."""
        whole = json.loads(config)
        self._decoupled = using_decoupled_model_transaction_policy(whole)
        self._reschedules = bool(whole.get("sequence_batching", {}).get("iterative_sequence", False))
        folder = self._path.parent
        is_version = folder.name.isdecimal()
        self._model = self._kind()
        if (initialize := getattr(self._model, "initialize", None)) is not None:
            self.result(
                initialize(
                    {
                        "model_config": config,
                        "model_instance_kind": self._device.upper(),
                        "model_instance_name": instance,
                        "model_instance_device_id": str(self._device_index),
                        "model_repository": str(folder.parent if is_version else folder),
                        "model_version": folder.name if is_version else "1",
                        "model_name": self._name,
                    }
                )
            )
        return self

    def close(self) -> None:
        self.close_by(getattr(self._model, "finalize", None))

    def sequences_over(self, over: Iterable[tuple[int | str | bytes, str]]) -> None:
        """Triton doesn't tell its models which sequences are over."""

    # hot path: 5 us, and what its tensors take
    def request(
        self,
        desk: Desk,
        input_names: Sequence[str],
        output_names: Sequence[str],
        number: int,
        request_id: str,
        parameters: Mapping[str, bool | int | float | str],
        wanted: tuple[int, ...],
        arrays: Sequence[Array],
        step: tuple[int | str, bool, bool] | None,
        timeout_us: int,
    ) -> InferenceRequest:
        """The request, as the class sees it."""
        state = RequestState(desk, number)
        places = {output_names[place]: place for place in wanted}
        inputs = [
            Tensor.received(name, array)
            for name, array in zip(input_names, arrays, strict=True)
            if array is not MISSING
        ]
        correlation_id, start, end = step or (0, False, False)
        return InferenceRequest.of_server(
            Received(state, places, self._decoupled),
            inputs,
            request_id,
            parameters,
            correlation_id,
            SEQUENCE_START * start | SEQUENCE_END * end,
            timeout_us,
            self._name,
        )

    def answered(self, link: BlockingLink, message: Message) -> Message:
        requests: list[InferenceRequest] = message[1]
        states = [one.received.state for one in requests if one.received is not None]
        try:
            returned = self._model.execute([*requests])
            if self._decoupled and inspect.isawaitable(returned):
                self._go_on(returned, states)
                returned = None
            returned = self.result(returned)
            self.end_fork()
            arrays: list[Array] = []
            ended = self._what_ended(requests, states, returned, arrays)
            return DONE, ended, link.pack(arrays)
        except BaseException as error:  # noqa: BLE001 - the model's; passed to the server
            for state in states:
                state.close()  # the server fails those that haven't ended
            return self.failure(error)

    def _go_on(self, coroutine: Any, states: Sequence[RequestState]) -> None:
        """Let a decoupled model's coroutine go on while others begin, as it answers by itself."""

        async def whole() -> None:
            try:
                await coroutine
            except Exception as error:  # noqa: BLE001 - the model's; passed to the callers
                self.tell(error)
                for state in states:
                    state.say_if_open(in_one_line(error))

        task = self.loop.create_task(whole())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _what_ended(
        self, requests: Sequence[InferenceRequest], states: Sequence[RequestState], returned: Any, arrays: list[Array]
    ) -> list[Ended]:
        """What became of each request. The outputs of those that were answered are added to `arrays`."""
        if returned is not None and self._decoupled:
            raise UnfitAnswer(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must return None, "
                f"got {type(returned).__name__}"
            )
        if returned is not None and not isinstance(returned, (list, tuple)):
            raise UnfitAnswer(f"Expected a list in the execute return, found type '{type(returned).__name__}'")
        responses: Sequence[Any] = (None,) * len(requests) if returned is None else returned
        if len(responses) != len(requests):
            raise UnfitAnswer(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects: expected "
                f"{len(requests)} responses from execute, got {len(responses)}"
            )
        ended: list[Ended] = []
        answers: dict[int, list[Array]] = {}
        for place, (request, state, response) in enumerate(zip(requests, states, responses, strict=True)):
            outputs: list[Array] = []
            try:
                became = self._what_became(request, response, outputs)
            except Exception as error:  # noqa: BLE001 - of this response alone
                self.tell(error)
                became = [in_one_line(error), EXECUTION_ERROR]
            if became is not None:
                state.close()
            if isinstance(became, tuple):
                answers[place] = outputs
            ended.append(became)
        columns = joined([ended[place] for place in answers], [*answers.values()])
        arrays += columns if columns is not None else chain.from_iterable(answers.values())
        if columns is not None:
            for place, outputs in answers.items():
                ended[place] = (*cast("tuple[tuple[int, ...], str, int]", ended[place])[:2], len(outputs[0]))
        return ended

    def _what_became(self, request: InferenceRequest, response: Any, outputs: list[Array]) -> Ended:
        if request.release == RELEASE_RESCHEDULE:
            if not self._reschedules:
                raise UnfitAnswer(
                    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: expected sequence_batching with "
                    "iterative_sequence in the model's configuration"
                )
            if response is not None:
                raise UnfitAnswer(
                    "Expected a None object in the execute function return list for rescheduled request, found type "
                    f"'{type(response).__name__}'"
                )
            return True
        if response is None:
            return None
        if not isinstance(response, InferenceResponse):
            raise UnfitAnswer(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response).__name__}'"
            )
        assert request.received is not None
        if request.received.responses:
            raise UnfitAnswer("Unable to send response. Non-decoupled model cannot send more than one response.")
        if (error := response.error()) is not None:
            return [error.message(), *error_kind(error)]
        places, found = outputs_of(response, request.received.places, left_out=False)
        outputs += found
        return places, response.parameters(), -1


def joined(ended: Sequence[Ended], answers: Sequence[Sequence[Array]]) -> list[Array] | None:
    """The outputs of `answers`, joined by rows, which costs both sides less. None unless these are alike but for their
    rows, and without parameters. `ended` is what became of their requests."""
    if len(answers) < 2 or not answers[0]:
        return None
    first, alike = ended[0], [(one.dtype, one.shape[1:]) for one in answers[0]]
    if not isinstance(first, tuple) or first[1]:
        return None
    for became, outputs in zip(ended, answers, strict=True):
        if became != first or [(one.dtype, one.shape[1:]) for one in outputs] != alike:
            return None
        if not outputs[0].ndim or any(one.shape[:1] != outputs[0].shape[:1] for one in outputs):
            return None
    return [np.concatenate(column) for column in zip(*answers, strict=True)]


def _class_in(path: Path) -> Any:
    """The class in the file at `path`, which is part of a package named after its folder, as in Triton, so that it may
    import what lies beside it relatively; that folder and the one around it are on `sys.path`."""
    folder = path.parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    package = sys.modules[folder.name] = ModuleType(folder.name)
    package.__path__ = [str(folder)]
    return class_in(path, f"{folder.name}.{path.stem}", "TritonPythonModel", "requests")


def _completed(kind: Any, config: str) -> str:
    """`config` as `auto_complete_config` leaves it, if the class has that."""
    complete = getattr(kind, "auto_complete_config", None)
    if complete is None:
        return config
    made = complete(ModelConfig(config))
    if not isinstance(made, ModelConfig):
        raise TypeError(f"auto_complete_config: expected a ModelConfig, got {type(made).__name__}")
    return json.dumps(made.as_dict())
