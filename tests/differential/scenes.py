"""Requests on one stream to models that run what their requests say: decoupled ones, ensembles, and models with memory.

Lives here: the models' configurations, the scenes as data, and what both servers answer and count. Must not: servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.protos import inference_pb2 as pb
from tests.differential.messages import infer
from tests.ensembles import Step, ensemble_config
from tests.triton_puppet import TENSORS

__all__ = ["ADDED", "MODELS", "SCENES", "SLOW", "Counted", "Scene", "Told", "asking", "step"]

Told = tuple[int | str | None, bool]
"""A number, "error" or nothing, and whether that is the last answer to its request."""

Counted = tuple[int, int, int, int]
"""Requests that succeeded and that failed, rows and executions of a model."""


def _puppet(config: str, instances: int = 1) -> str:
    return f'backend: "python" instance_group {{ kind: KIND_CPU count: {instances} }} {TENSORS} {config}'


def _sequences(more: str) -> str:
    flag = "bool_false_true: [ false, true ]"
    return f"""max_batch_size: 4 sequence_batching {{ {more}
        control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START {flag} }} }}
        control_input {{ name: "READY" control {{ kind: CONTROL_SEQUENCE_READY {flag} }} }}
        control_input {{ name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} }} }}"""


def _ensemble(*models: str) -> str:
    """Its steps, one behind the other."""
    names = ["x", *(f"between{number}" for number in range(1, len(models))), "y"]
    steps: list[Step] = [
        (model, {"x": before}, {"y": after}) for model, before, after in zip(models, names, names[1:], strict=False)
    ]
    return ensemble_config(steps, {"x": "INT64 1"}, {"y": "INT64 1"})


_BATCHED = "max_batch_size: 8 dynamic_batching { }"
_DECOUPLED = "model_transaction_policy { decoupled: true }"
MODELS: Mapping[str, str] = {
    "plain": _puppet("max_batch_size: 8"),
    "open": _puppet(f"{_DECOUPLED} {_BATCHED}"),
    "chain": _ensemble("plain", "plain"),
    "opens": _ensemble("open", "plain"),
    "ends_open": _ensemble("plain", "open"),
    "memory": _puppet(_sequences("oldest { max_candidate_sequences: 4 } max_sequence_idle_microseconds: 60000000"), 2),
    "forgetful": _puppet(_sequences("oldest { max_candidate_sequences: 4 } max_sequence_idle_microseconds: 1000000")),
    "places": _puppet(_sequences("direct { } max_sequence_idle_microseconds: 60000000")),
    "again": _puppet(f"{_DECOUPLED} {_sequences('iterative_sequence: true oldest { }')}"),
}

_SENDER = "s = request.get_response_sender()\n"
SLOW = "import time; time.sleep(0.5); "
_FAILS = "raise ValueError('no')"
# Of an ensemble, each step runs the same code.
_ADDS = "answer(10 + int(pb_utils.get_input_tensor_by_name(request, 'x').as_numpy()[0, 0]))"
_SUM = """
of = lambda name: int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0])
sums = vars(model).setdefault("sums", {})
sums[of("CORRID")] = of("x") + (0 if of("START") else sums.get(of("CORRID"), -1000))
"""
ADDED = f"{_SUM}response = answer(sums[of('CORRID')])"
_AGAIN = f"""{_SUM}{_SENDER}
last = sums[of("CORRID")] == 3
s.send(answer(sums[of("CORRID")]), final if last else 0)
if not last:
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""


def asking(
    model: str, code: str, id: str = "", number: int = 1, outputs: Sequence[str] = ("y",), **parameters: object
) -> pb.ModelInferRequest:
    """A request of one row, which is `number`, by which the model runs `code`."""
    inputs = {"x": np.array([[number]], np.int64)}
    return infer(model, inputs, outputs=outputs, id=id, parameters={"run": code, **parameters})


def step(
    sequence: int, code: str = ADDED, model: str = "memory", *,
    start: bool = False, end: bool = False, **parameters: object,
) -> pb.ModelInferRequest:  # fmt: skip
    """A step of a sequence, answered with the sum of its numbers since it began."""
    return asking(model, code, sequence_id=sequence, sequence_start=start, sequence_end=end, **parameters)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is sent, and what Triton answers and counts; this server does the same where `here` and `counts_here` have
    nothing else, and then `row` is the beginning of the row of docs/protocol.md that says why."""

    what: str
    requests: Sequence[pb.ModelInferRequest]
    triton: Sequence[Told]
    counts: Mapping[str, Counted] = field(default_factory=dict)
    here: Sequence[Told] | None = None
    counts_here: Mapping[str, Counted] = field(default_factory=dict)
    row: str = ""


def _open(code: str, *, model: str = "open", **parameters: object) -> Sequence[pb.ModelInferRequest]:
    return [asking(model, _SENDER + code, **parameters)]


def _opens(code: str, before: str = "") -> Sequence[pb.ModelInferRequest]:
    """To the ensemble with a decoupled step, which runs `code`; the other adds 10, after `before`."""
    inner = "".join(f"    {line}\n" for line in (_SENDER + code).splitlines())
    code = f"if model.decoupled:\n{inner}else:\n    {before}response = {_ADDS}"
    return [asking("opens", code, triton_enable_empty_final_response=True)]


EMPTY_FINAL = {"triton_enable_empty_final_response": True}
NONE: Counted = (0, 0, 0, 0)
ONE: Counted = (1, 0, 1, 1)
AT_THE_END = "an error that is a model's response"
OF_A_STEP = "an error of an ensemble's decoupled step"
TWICE = "a failed request to an ensemble"
FAILED = "executions that fail"
_THREE = "for n in range(3): s.send(answer(n))\ns.send(flags=final)"

DECOUPLED = [
    Scene("three answers", _open(_THREE), [(0, False), (1, False), (2, False)], {"open": ONE}),
    Scene("three answers and their end", _open(_THREE, **EMPTY_FINAL),
          [(0, False), (1, False), (2, False), (None, True)], {"open": ONE}),
    Scene("an answer that ends", _open("s.send(answer(1))\ns.send(answer(2), final)"), [(1, False), (2, True)],
          {"open": ONE}),
    Scene("an answer that ends, and its end", _open("s.send(answer(2), final)", **EMPTY_FINAL), [(2, True)],
          {"open": ONE}),
    Scene("no answer", _open("s.send(flags=final)"), [], {"open": ONE}),
    Scene("no answer but the end", _open("s.send(flags=final)", **EMPTY_FINAL), [(None, True)], {"open": ONE}),
    Scene("an answer without outputs", _open("s.send(pb_utils.InferenceResponse([]))\ns.send(flags=final)"),
          [(None, False)], {"open": ONE}),
    Scene("an error among answers", _open("s.send(error('no'))\ns.send(answer(1))\ns.send(flags=final)"),
          [("error", False), (1, False)], {"open": ONE}),
    Scene("an error that ends", _open("s.send(answer(1))\ns.send(error('no'), final)"), [(1, False), ("error", True)],
          {"open": ONE}, counts_here={"open": (0, 1, 1, 1)}, row=AT_THE_END),
    Scene("an error of a model that answers once", [asking("plain", "response = error('no')")], [("error", True)],
          {"plain": ONE}, counts_here={"plain": (0, 1, 1, 1)}, row=AT_THE_END),
    Scene("an exception behind an answer", _open(f"s.send(answer(1))\n{_FAILS}"), [(1, False), ("error", True)],
          {"open": (0, 1, 0, 1)}, counts_here={"open": (0, 1, 0, 0)}, row=FAILED),
]  # fmt: skip

ENSEMBLES = [
    # The last step is slow, so that it hears of the first one's end before its own last answer, which then says so.
    Scene("three answers of a step", _opens(_THREE, SLOW), [(10, False), (11, False), (12, True)],
          {"opens": ONE, "open": ONE, "plain": (3, 0, 3, 3)}),
    Scene("an answer of a step that ends", _opens("s.send(answer(1), final)"), [(11, True)],
          {"opens": ONE, "open": ONE, "plain": ONE}),
    Scene("no answer of a step", _opens("s.send(flags=final)"), [(None, True)],
          {"opens": ONE, "open": ONE, "plain": NONE}),
    Scene("a last step with two answers",
          [asking("ends_open", f"if model.decoupled:\n    {_SENDER}    s.send(answer(2))\n    s.send(answer(3))\n"
                               f"    s.send(flags=final)\nelse:\n    response = {_ADDS}", **EMPTY_FINAL)],
          [(2, False), (3, False), (None, True)], {"ends_open": ONE, "open": ONE, "plain": ONE}),
    Scene("an error among a step's answers",
          _opens("s.send(error('no'))\ns.send(answer(1))\ns.send(flags=final)", SLOW), [("error", True)],
          {"opens": (0, 1, 0, 0), "open": ONE, "plain": NONE}, [("error", False), (11, True)],
          {"opens": ONE, "plain": ONE}, OF_A_STEP),
    Scene("an error that ends a step", _opens("s.send(answer(1))\ns.send(error('no'), final)", SLOW),
          [("error", True)], {"opens": (0, 1, 0, 0), "open": ONE, "plain": ONE}, [(11, False), ("error", True)],
          {"open": (0, 1, 1, 1)}, OF_A_STEP),
    Scene("an exception in a decoupled step", _opens(_FAILS), [("error", True)],
          {"opens": (0, 2, 0, 0), "open": (0, 1, 0, 1)}, counts_here={"opens": (0, 1, 0, 0), "open": (0, 1, 0, 0)},
          row=TWICE),
    Scene("two steps", [asking("chain", f"response = {_ADDS}")], [(21, True)], {"chain": ONE, "plain": (2, 0, 2, 2)}),
    Scene("an exception in the first of two steps", [asking("chain", _FAILS)], [("error", True)],
          {"chain": (0, 2, 0, 0), "plain": (0, 1, 0, 1)},
          counts_here={"chain": (0, 1, 0, 0), "plain": (0, 1, 0, 0)}, row=TWICE),
]  # fmt: skip

_START, _MORE, _END = {"start": True}, dict[str, bool](), {"end": True}
_REFUSED = "requests refused before"


def _steps(sequence: int, *steps: Mapping[str, bool | str]) -> Sequence[pb.ModelInferRequest]:
    return [step(sequence, id=str(number), **flags) for number, flags in enumerate(steps)]  # type: ignore[arg-type]


SEQUENCES = [
    Scene("steps of a sequence", _steps(1, _START, _MORE, _END), [(1, True), (2, True), (3, True)],
          {"memory": (3, 0, 3, 3)}),
    Scene("a start behind others", _steps(2, _START, _MORE, _START, _END), [(1, True), (2, True), (1, True), (2, True)],
          {"memory": (4, 0, 4, 4)}),
    Scene("a step that fails", _steps(3, _START, {"code": _FAILS}, _MORE, _END),
          [(1, True), ("error", True), (2, True), (3, True)], {"memory": (3, 1, 3, 4)},
          counts_here={"memory": (3, 1, 3, 3)}, row=FAILED),
    Scene("a start behind a step that fails", _steps(4, _START, {"code": _FAILS}, _START, _END),
          [(1, True), ("error", True), (1, True), (2, True)], {"memory": (3, 1, 3, 4)},
          counts_here={"memory": (3, 1, 3, 3)}, row=FAILED),
    Scene("a start that fails", _steps(5, {**_START, "code": _FAILS}, _MORE, _END),
          [("error", True), (-999, True), (-998, True)], {"memory": (2, 1, 2, 3)},
          counts_here={"memory": (2, 1, 2, 2)}, row=FAILED),
    Scene("an end that fails, and a step behind it", _steps(6, _START, {**_END, "code": _FAILS}, _MORE),
          [(1, True), ("error", True), ("error", True)], {"memory": (1, 1, 1, 2)},
          counts_here={"memory": (1, 2, 1, 1)}, row=_REFUSED),
    Scene("a start that is the end, and a step behind it", _steps(7, {**_START, **_END}, _MORE),
          [(1, True), ("error", True)], {"memory": ONE}, counts_here={"memory": (1, 1, 1, 1)}, row=_REFUSED),
    Scene("a step without a start", _steps(8, _MORE), [("error", True)], {"memory": NONE},
          counts_here={"memory": (0, 1, 0, 0)}, row=_REFUSED),
    Scene("a timeout where nothing waits for a place", [step(9, start=True, end=True, timeout=1)], [(1, True)],
          {"memory": ONE}),
    Scene("a request that comes back twice", [asking("again", _AGAIN)], [(1, False), (2, False), (3, True)],
          {"again": (3, 1, 3, 3)}, counts_here={"again": (1, 0, 1, 3)}, row="a request that comes back"),
    Scene("one of a sequence that wasn't started", [step(1, _AGAIN, "again")], [("error", True)], {"again": NONE},
          [(1, False), (2, False), (3, True)], {"again": (1, 0, 1, 3)}, "a request that comes back"),
]  # fmt: skip

SCENES = [*DECOUPLED, *ENSEMBLES, *SEQUENCES]
