"""Requests from within the process: the steps of an ensemble, what a model asks of another, what an application asks of
the engine in it.

Lives here: how they are made of plain values, and how their ends are told. Must not: their way, which is that of any
request (`Inference.announce_to`): they share batches with everybody's, are refused like them, obey their deadlines, and
are counted with their model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from paceline.backends.base import Execution
from paceline.backends.spec import Array
from paceline.protos.datatypes import by_dtype, by_name, datatype_of
from paceline.protos.inference_pb2 import InferParameter
from paceline.protos.wire import STEP_KEYS
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.array_request import ArrayAnswer, ArrayRequest, NamedArray
from paceline.server.codec.parameters import parse_parameters, step_of
from paceline.server.errors import InvalidRequest
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.in_flight import InFlight, NextAnswer
from paceline.server.requests.open_flight import PartialAnswer

_MOST_UNSIGNED = 2**64 - 1


class InnerRequest(InFlight):
    """`on_end` is called once it has ended, unless it was given up: with its `outputs`, by name, or with `error` set as
    long as that call lasts. Outputs are shares of what their batch has left, which stays in memory as long as they do.
    `deadline_ns` is when its answer has to be there.

    `on_next`, if given: it may be answered more than once, and this is called for each answer before the last, with an
    error in place of its outputs, if it is one. Then the last one may be empty. Whoever holds answers back has to call
    `sent` of each when it is used: until then its model may have to wait.
    """

    __slots__ = ("error", "made_for", "on_end", "on_next", "outputs", "spent_ns", "takes_more")

    takes_arrays = True

    def __init__(
        self,
        message: ArrayRequest,
        on_end: Callable[[InnerRequest], None],
        *,
        deadline_ns: int,
        made_for: InFlight | None = None,
        on_next: Callable[[InnerRequest, PartialAnswer, Exception | None], None] | None = None,
    ) -> None:
        parent = made_for.trail.as_parent if made_for is not None and made_for.trail is not None else None
        super().__init__(message, deadline_ns, parent, NO_PASSED_HEADERS)
        self.made_for = made_for
        self.on_end = on_end
        self.on_next = on_next
        self.takes_more = on_next is not None
        self.outputs = ArrayAnswer()
        self.error: BaseException | None = None
        self.spent_ns = (0, 0, 0)
        """How long its batch took before, in and after the model, once it has ended."""

    def let_go(self) -> None:
        self.made_for = None
        if self.batch_facts is not None and isinstance(executed := self.batch_facts.executed, Execution):
            self.spent_ns = executed.input_ns, executed.infer_ns, executed.output_ns
        super().let_go()

    def on_failure(self, error: BaseException) -> None:
        self.error = error

    def on_done(self) -> None:
        try:
            self.on_end(self)
        finally:
            self.error = None  # its traceback has frames that lead back to this request
            self.on_end, self.on_next = _nothing, None

    def on_open(self) -> None:
        pass

    def on_more(self, answer: NextAnswer, error: Exception | None) -> None:
        assert self.on_next is not None
        self.on_next(self, cast("PartialAnswer", answer), error)  # they are made in this process

    def end_of_answers(self) -> bytes:
        return b""


def _nothing(request: InnerRequest) -> None:
    pass


def array_request(
    model: ServedModel,
    inputs: Mapping[str, Array],
    *,
    version: str = "",
    outputs: Sequence[str] = (),
    id: str = "",
    parameters: Mapping[str, bool | int | float | str],
) -> ArrayRequest:
    """A request for `model`, with parameters as clients may send them. Raises InvalidRequest."""
    texts = (("a parameter's name", parameters), ("an input's name", inputs), ("an output's name", outputs))
    for what, names in (*texts, ("the request's id", (id,))):
        for name in names:
            _check_text(what, name)
    given = {key: _parameter(key, value) for key, value in parameters.items()}
    parse_parameters(given)
    return ArrayRequest(
        model.name,
        version,
        _named(model, inputs),
        outputs,
        id=id,
        step=step_of(given),
        parameters={key: one for key, one in given.items() if key not in STEP_KEYS},
    )


def _named(model: ServedModel, inputs: Mapping[str, Array]) -> list[NamedArray]:
    """Arrays with datatypes: the model's own if that is how it has them."""
    own = {tensor.name: tensor.datatype for tensor in model.spec.inputs}
    named: list[NamedArray] = []
    for name, array in inputs.items():
        declared = own.get(name, "")
        try:
            datatype = datatype_of(array.dtype, by_name(declared)) if declared else by_dtype(array.dtype)
        except ValueError:
            what = f"expected an array of a datatype such as {declared or 'FP32'}, got {array.dtype}"
            raise InvalidRequest(f"model '{model.name}': input '{name}': {what}") from None
        named.append((name, datatype.name, array))
    return named


def _check_text(what: str, text: object) -> None:
    """Whether a message can have it."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{what}: expected a str, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what}: expected text that UTF-8 can encode, got {text!r}") from None


def _parameter(key: str, value: object) -> InferParameter:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return InferParameter(bool_param=value)
    if isinstance(value, str):
        _check_text(f"parameter '{key}'", value)
        return InferParameter(string_param=value)
    if isinstance(value, float):
        return InferParameter(double_param=value)
    if not isinstance(value, int):
        raise InvalidRequest(f"parameter '{key}': expected bool, int, float or str, got {type(value).__name__}")
    if -(2**63) <= value < 2**63:
        return InferParameter(int64_param=value)
    if 0 < value <= _MOST_UNSIGNED:
        return InferParameter(uint64_param=value)
    raise InvalidRequest(f"parameter '{key}': expected a whole number of 64 bits, got {value}")
