"""Requests that are steps of sequences: what their parameters say, checked against what the model wants to know.

Lives here: the checks of a step, in the order that Triton has them. Must not: keep anything about a sequence, which is
the batcher's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.backends.spec import ControlKind, SequenceSpec
from paceline.protos.inference_pb2 import ModelInferRequest
from paceline.scheduler.errors import NoSequence, SchedulerError
from paceline.scheduler.request import SequenceStep
from paceline.server.codec.parameters import step_of
from paceline.server.codec.wire_request import AnyRequest
from paceline.server.errors import InvalidRequest, ServerError

__all__ = ["Steps", "step_in"]

NO_STEP = SequenceStep(0)


# hot path: see bench/
def step_in(request: AnyRequest) -> SequenceStep | None:
    """What a request says of its sequence; None if nothing."""
    return step_of(request.parameters) if isinstance(request, ModelInferRequest) else request.step


class Steps:
    """The steps of `model`, which executes them as `sequence` says."""

    def __init__(self, model: str, sequence: SequenceSpec) -> None:
        self._model = model
        self._iterative = sequence.iterative
        ids = [one.tensor for one in sequence.controls if one.kind is ControlKind.CORRID]
        self._id = ids[0] if ids else None

    # hot path: see bench/
    def of(self, request: AnyRequest) -> SequenceStep:
        """The step that `request` is; its other parameters are checked. Raises NoSequence, or InvalidRequest for an id
        that the model can't be told. Of a model that iterates, requests needn't be any."""
        step = step_in(request)
        if step is None or not step.id:
            if self._iterative:
                return NO_STEP
            raise NoSequence(self._model)
        if self._id is not None and isinstance(step.id, str) != (self._id.datatype == "BYTES"):
            got = "BYTES" if isinstance(step.id, str) else "UINT64"
            wanted = "string_param" if self._id.datatype == "BYTES" else "int64_param"
            raise InvalidRequest(
                f"sequence batching control '{self._id.name}' data-type is '{got}', but model '{self._model}' expects "
                f"'{self._id.datatype}': expected sequence_id as {wanted}, got {step.id!r}"
            )
        return step

    # hot path: see bench/
    def good(self, requests: Iterable[AnyRequest], steps: list[SequenceStep]) -> Iterator[AnyRequest]:
        """Those of `requests` before the first whose step can't be, each after its step was added to `steps`."""
        for request in requests:
            try:
                steps.append(self.of(request))
            except (SchedulerError, ServerError):
                return  # it is refused when its turn comes
            yield request
