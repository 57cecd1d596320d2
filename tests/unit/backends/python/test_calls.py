"""Calls of a model's code to other models, as far as its process: what they bring, and what ends them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from paceline.backends.errors import LoadError, ProcessError, UpstreamFailed, UpstreamRefused
from paceline.backends.model_call import ModelCall
from paceline.backends.python.backend import PythonBackend
from paceline.backends.python.instance import PythonInstance
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from tests.unit.backends.python_models import CPU, model_source

SPEC = ModelSpec(
    (TensorSpec("run", "BYTES", (1,)), TensorSpec("x", "FP32", (16,))), (TensorSpec("y", "FP32", (4,)),), batched=True
)
SOURCE = """
import asyncio
import numpy as np

class Model:
    inputs = {"run": ("BYTES", [-1, 1]), "x": ("FP32", [-1, 16])}
    outputs = {"y": ("FP32", [-1, 4])}

    def execute(self, inputs):
        known = {**globals(), "other": self.models["other"], "y": np.zeros((1, 4), np.float32)}
        exec(inputs["run"][0, 0].decode(), known)
        return {"y": known["y"]}
"""
ONE = np.ones((1, 4), np.float32)


class Calls(SimpleQueue[ModelCall]):
    """Calls that have come."""

    def next(self) -> ModelCall:
        return self.get(timeout=20)


@contextmanager
def opened(folder: Path, calls: Calls) -> Iterator[PythonInstance]:
    (folder / "model.py").write_text(SOURCE)
    source = model_source(folder / "model.py", calls=("other",), on_call=calls.put)
    model = PythonBackend().open(source, CPU)
    instance = model.instance(SPEC, CPU)
    try:
        yield instance
    finally:
        instance.close()
        model.close()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def instance(tmp_path: Path, calls: Calls) -> Iterator[PythonInstance]:
    with opened(tmp_path, calls) as instance:
        yield instance


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """Executes while the test answers calls."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def run(instance: PythonInstance, code: str) -> Array:
    done = instance.execute([(np.array([[code.encode()]], object), np.ones((1, 16), np.float32))])
    (result,) = done.results
    assert not isinstance(result, Exception)
    return result[0]


def test_call_brings_what_the_code_says(instance: PythonInstance, calls: Calls, thread: ThreadPoolExecutor) -> None:
    code = """
parameters = {'priority': np.int64(2), 'text': 'a', 'on': True}
asked = {'version': 3, 'outputs': ['z'], 'request_id': '7', 'parameters': parameters, 'timeout_s': 2}
answer = other.infer({'a': ['one', 'two']}, **asked)
y = answer['z'] * answer.parameters['times']
"""
    result = thread.submit(run, instance, code)
    call = calls.next()
    assert (call.model, call.version, call.outputs, call.id, call.timeout_ns) == ("other", "3", ("z",), "7", 2 * 10**9)
    assert call.parameters == {"priority": 2, "text": "a", "on": True}
    assert call.inputs["a"].tolist() == [b"one", b"two"]
    assert call.executing
    assert not call.takes_more
    call.answer({"z": ONE}, {"times": 3}, last=True)
    np.testing.assert_array_equal(result.result(timeout=20), ONE * 3)


def test_calls_at_the_same_time_get_their_own_answers(
    instance: PythonInstance, calls: Calls, thread: ThreadPoolExecutor
) -> None:
    code = """
async def both():
    return await asyncio.gather(*(other.async_infer({'a': np.array([n])}) for n in range(2)))
first, second = asyncio.run(both())
y = first['z'] - 2 * second['z']
"""
    result = thread.submit(run, instance, code)
    for call in sorted((calls.next(), calls.next()), key=lambda one: -int(one.inputs["a"][0])):
        call.answer({"z": ONE * (5 + int(call.inputs["a"][0]))}, last=True)
    np.testing.assert_array_equal(result.result(timeout=20), ONE * (5 - 2 * 6))


def test_large_answers_beyond_those_read_are_told(
    instance: PythonInstance, calls: Calls, thread: ThreadPoolExecutor
) -> None:
    code = "y = sum(one['z'][:, :4] for one in other.stream_infer({'a': np.zeros(1)}))"
    result = thread.submit(run, instance, code)
    call, read = calls.next(), SimpleQueue[int]()
    assert call.takes_more
    call.taken_by(on_cancel=lambda: None, on_read=read.put, on_call_off=lambda: None)
    for _ in range(20):
        call.answer({"z": np.ones((1, 100_000), np.float32)}, last=False)
    assert [read.get(timeout=20), read.get(timeout=20)] == [8, 8]
    call.answer(None, last=True)
    np.testing.assert_array_equal(result.result(timeout=20), ONE * 20)


@pytest.mark.parametrize(
    ("status", "kind"), [("INVALID_ARGUMENT", UpstreamRefused), ("UNAVAILABLE", UpstreamFailed)]
)  # fmt: skip
def test_uncaught_failure_says_whose_fault_it_is(
    instance: PythonInstance,
    calls: Calls,
    thread: ThreadPoolExecutor,
    status: str,
    kind: type[UpstreamRefused | UpstreamFailed],
) -> None:
    result = thread.submit(run, instance, "other.infer({})")
    calls.next().fail(status, "no luck")
    with pytest.raises(kind, match=r"^no luck$") as caught:
        result.result(timeout=20)
    assert caught.value.status == status


def test_execution_that_is_called_off_loses_its_calls(
    instance: PythonInstance, calls: Calls, thread: ThreadPoolExecutor
) -> None:
    result = thread.submit(run, instance, "other.infer({})")
    call = calls.next()
    call.taken_by(
        on_cancel=lambda: None, on_read=lambda _: None, on_call_off=lambda: call.fail("CANCELLED", "nobody waits")
    )
    instance.call_off()
    with pytest.raises(UpstreamFailed, match="nobody waits"):
        result.result(timeout=20)
    np.testing.assert_array_equal(run(instance, ""), 0 * ONE)


def test_answer_that_cannot_be_sent_fails_the_call(
    instance: PythonInstance, calls: Calls, thread: ThreadPoolExecutor
) -> None:
    class Name(str):
        __slots__ = ()

    result = thread.submit(run, instance, "other.infer({})")
    calls.next().answer({Name("z"): np.ones(20_000, np.float32)}, last=True)
    with pytest.raises(
        UpstreamRefused, match="outputs can't be handed to the model that called: unmarshallable object"
    ):
        result.result(timeout=20)
    process = instance._process
    assert process is not None
    assert process._link.used_bytes == 0


def test_end_of_the_process_cancels_its_calls(
    instance: PythonInstance, calls: Calls, thread: ThreadPoolExecutor
) -> None:
    result = thread.submit(run, instance, "other.infer({})")
    call, cancelled = calls.next(), SimpleQueue[None]()
    call.taken_by(on_cancel=lambda: cancelled.put(None), on_read=lambda _: None, on_call_off=lambda: None)
    instance.abandon()
    cancelled.get(timeout=20)
    with pytest.raises(ProcessError):
        result.result(timeout=20)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("other.infer([1])", "model 'other': expected a dict of inputs by name, got list"),
        ("other.infer({}, outputs='y')", "model 'other': expected a list of outputs, got the text 'y'"),
        ("other.infer({}, timeout_s=0)", "model 'other': expected a timeout_s above 0, got 0"),
        ("other.infer({}, parameters={'a': None})", "parameter 'a': expected a bool, a whole number"),
        ("other.infer({'a': [None]})", "input 'a': expected numbers of one datatype, or bytes, got NoneType"),
    ],
)
def test_call_that_cannot_be_made_raises_at_once(instance: PythonInstance, calls: Calls, code: str, text: str) -> None:
    with pytest.raises(Exception, match=text):
        run(instance, code)
    assert calls.empty()


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("__slots__ = ()", "attribute 'models' of class Model, for .* expected that it can be set, got"),
        ("models = None", "attribute 'models' of class Model, for .* expected none of the class's own, got one"),
    ],
)
def test_class_that_cannot_take_models_fails_its_load(tmp_path: Path, attribute: str, text: str) -> None:
    declared = 'inputs = {"x": ("FP32", [1])}\n    outputs = inputs\n    def execute(self, inputs): pass'
    (tmp_path / "model.py").write_text(f"class Model:\n    {attribute}\n    {declared}")
    with pytest.raises(LoadError, match=text):
        PythonBackend().open(model_source(tmp_path / "model.py", calls=("other",)), CPU)
    PythonBackend().open(model_source(tmp_path / "model.py"), CPU).close()
