"""Execution of Python models: their inputs and outputs, what they may get wrong, and what they print."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError, InstanceError, UnfitOutputs
from paceline.backends.python.instance import PythonInstance
from paceline.backends.spec import MISSING, BatchInput, BatchInputKind, ModelSpec, TensorSpec
from tests import puppet
from tests.polling import eventually
from tests.unit.backends.python_models import CLASS, run, serving


def single(datatype: str) -> ModelSpec:
    """One element of `x` as the input, one of `y` as the output."""
    return ModelSpec((TensorSpec("x", datatype, (1,)),), (TensorSpec("y", datatype, (1,)),), batched=True)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        (puppet.RAISE, ExecutionError, "^ValueError: this is no good$"),
        (
            puppet.ROWS,
            ExecutionError,
            r"expected shape \[2, 1\], got \[0, 1\]; the first dimension of every output must",
        ),
        (puppet.TYPE, UnfitOutputs, "output 'OUTPUT0': expected INT64, got numpy's float64"),
        (puppet.NOT_A_DICT, UnfitOutputs, "^execute: expected a dict of outputs by name, got list"),
        (puppet.MISSING_OUTPUT, UnfitOutputs, r"^execute: expected output 'OUTPUT0', got only \['OUTPUT1'\]"),
    ],
)
def test_execute_that_goes_wrong_says_how_and_the_process_keeps_running(
    instance: PythonInstance, what: int, kind: type[ExecutionError], words: str
) -> None:
    (pid,) = run(instance, puppet.PID)
    with pytest.raises(ExecutionError, match=words) as caught:
        run(instance, 1, what)
    assert type(caught.value) is kind
    assert run(instance, puppet.PID) == [pid]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ('ValueError("begin" + 10_000_000 * "o" + "end")', "^ValueError: begino{9,4000} .* o{9,4000}end$"),
        ("Wordless()", "^Wordless$"),
        ('ValueError("\\ud800")', "^ValueError: .*"),
        ('ExceptionGroup("several", [ValueError("a")])', r"^ExceptionGroup: several \(1 sub-exception\)$"),
        ('asyncio.CancelledError("of a task")', "^CancelledError: of a task$"),
        ('Panic("index out of bounds")', "^Panic: index out of bounds$"),
        ("Speechless()", "^Speechless$"),
    ],
)
def test_any_exception_is_reported_in_a_bounded_line_and_the_process_keeps_running(
    folder: Path, caplog: pytest.LogCaptureFixture, error: str, words: str
) -> None:
    fails = f"""
import asyncio


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Panic(BaseException):
    # As those of packages that are written in Rust.
    pass


class Speechless(Exception):
    def __str__(self):
        raise SystemExit(3)


class Model:
    inputs = {{"x": ("INT64", [-1, 1])}}
    outputs = {{"y": ("INT64", [-1, 1])}}

    def execute(self, inputs):
        if inputs["x"].any():
            raise {error}
        return {{"y": inputs["x"]}}
"""
    with caplog.at_level(logging.INFO, "paceline.models"), serving(folder, fails, single("INT64")) as instance:
        with pytest.raises(ExecutionError, match=words):
            run(instance, 1)
        assert run(instance, 0) == [0]
    eventually(lambda: any("Traceback" in line for line in caplog.messages), "the traceback")
    assert sum(map(len, caplog.messages)) < 50_000


FORKS = """
import os


class Model:
    inputs = {"x": ("INT64", [-1, 1])}
    outputs = {"y": ("INT64", [-1, 1])}

    def execute(self, inputs):
        x = inputs["x"]
        if x.max() < 0 and os.fork() == 0:
            if x.min() == -1:
                raise OSError("that went wrong in the fork")
            return {"y": x * 100}
        if x.max() < 0:
            os.wait()
        return {"y": x * 10}
"""


@pytest.mark.parametrize(
    ("element", "words"), [(-1, "that went wrong in the fork"), (-2, "a fork of the model's process")]
)
def test_fork_that_returns_from_execute_sends_no_answer(
    folder: Path, caplog: pytest.LogCaptureFixture, element: int, words: str
) -> None:
    with caplog.at_level(logging.INFO, "paceline.models"):
        with serving(folder, FORKS, single("INT64")) as instance:
            assert run(instance, element) == [10 * element]
            assert [run(instance, number) for number in range(3)] == [[0], [10], [20]]
        eventually(lambda: any(words in line for line in caplog.messages), "what became of the fork")


def test_execute_out_of_memory_is_not_the_requests_fault(instance: PythonInstance) -> None:
    with pytest.raises(InstanceError, match="MemoryError: all gone"):
        run(instance, puppet.MEMORY)
    assert run(instance, 2) == [20]


def test_execute_of_many_large_batches_leaves_no_memory_in_use(instance: PythonInstance) -> None:
    elements = np.arange(100_000, dtype=np.int64).reshape(-1, 1)
    for _ in range(20):
        (result,) = instance.execute([(elements,)]).results
        assert not isinstance(result, Exception)
        np.testing.assert_array_equal(result[0], elements * 10)
    del result
    assert run(instance, 1) == [10]
    process = instance._process
    assert process is not None
    assert process._link.used_bytes == 0


def test_execute_bool_of_other_bytes_than_0_and_1_is_true(folder: Path) -> None:
    text = """
import numpy
class Model:
    inputs = {"x": ("UINT8", [-1, 1])}
    outputs = {"y": ("BOOL", [-1, 1])}
    def execute(self, inputs):
        return {"y": inputs["x"].view(bool)}
"""
    spec = ModelSpec((TensorSpec("x", "UINT8", (1,)),), (TensorSpec("y", "BOOL", (1,)),), batched=True)
    with serving(folder, text, spec) as instance:
        (((result,),)) = instance.execute([(np.array([[0], [1], [2], [255]], np.uint8),)]).results
    assert result.view(np.uint8).tolist() == [[0], [1], [1], [1]]


def test_execute_text_is_encoded_and_anything_else_refused(folder: Path) -> None:
    text = """
import numpy
class Model:
    inputs = {"x": ("BYTES", [-1, 1])}
    outputs = {"y": ("BYTES", [-1, 1])}
    def execute(self, inputs):
        if inputs["x"][0, 0] == b"numpy":
            return {"y": numpy.array([["t\u00e9xt"], ["a\\0"]], numpy.dtypes.StringDType())}
        answers = {b"text": "t\u00e9xt", b"bytes": b"a\\0", b"\\xff\\0": b"\\xfe\\0", b"none": None}
        return {"y": [[answers[row[0]]] for row in inputs["x"]]}
"""
    with serving(folder, text, single("BYTES")) as instance:
        for elements in (b"text", b"bytes"), (b"numpy", b""):
            execution = instance.execute([(np.array(elements, object).reshape(2, 1),)])
            assert [array.tolist() for (array,) in execution.results] == [[["t\u00e9xt".encode()], [b"a\0"]]]
        ((not_utf8,),) = instance.execute([(np.array([[b"\xff\0"]], object),)]).results
        assert not_utf8.tolist() == [[b"\xfe\0"]]
        with pytest.raises(ExecutionError, match="'y': expected numbers of one datatype, or bytes, got NoneType"):
            instance.execute([(np.array([[b"none"]], object),)])


def test_execute_omits_missing_inputs_from_the_dict_and_adds_batch_inputs_by_name(folder: Path) -> None:
    text = """
class Model:
    inputs = {"a": ("FP32", [-1]), "b": ("FP32", [-1, 1]), "ends": ("INT32", [-1])}
    outputs = {"y": ("FP32", [-1, 1])}
    def execute(self, inputs):
        rows = [part.sum() for part in __import__("numpy").split(inputs["a"], inputs["ends"])[:-1]]
        y = __import__("numpy").array(rows, "f4")[:, None]
        return {"y": y + inputs["b"] if "b" in inputs else y}
"""
    spec = ModelSpec(
        (TensorSpec("a", "FP32", (-1,), ragged=True), TensorSpec("b", "FP32", (1,), optional=True)),
        (TensorSpec("y", "FP32", (1,)),),
        batched=True,
        batch_inputs=(BatchInput(BatchInputKind.ACCUMULATED_ELEMENT_COUNT, ("ends",), "INT32", "a"),),
    )
    first, second = (np.ones((1, size), np.float32) for size in (3, 5))
    ten = np.full((1, 1), 10, np.float32)
    with serving(folder, text, spec) as instance:
        without = instance.execute([(first, MISSING), (second, MISSING)]).results
        assert [array.tolist() for (array,) in without] == [[[3]], [[5]]]
        with_ten = instance.execute([(first, ten), (second, ten)]).results
        assert [array.tolist() for (array,) in with_ten] == [[[13]], [[15]]]


def test_output_goes_to_the_log_with_the_models_name(
    instance: PythonInstance, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline.models"):
        run(instance, puppet.PRINT)
        eventually(lambda: "model 'm': its words" in caplog.messages, "both lines in the log")
    assert "model 'm': these are" in caplog.messages


def test_long_line_of_output_is_split_between_characters(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = ModelSpec((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", ()),), batched=True)
    with (
        caplog.at_level(logging.INFO, "paceline.models"),
        serving(folder, f"print('a' + 5000 * 'é')\nprint('that was it')\n{CLASS}", spec),
    ):
        eventually(lambda: "model 'm': that was it" in caplog.messages, "all lines in the log")
    lines = [message.removeprefix("model 'm': ") for message in caplog.messages]
    assert "".join(lines[: lines.index("that was it")]) == "a" + 5000 * "é"


def test_traceback_goes_to_the_log_once_for_each_place(
    instance: PythonInstance, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline.models"):
        for what in (puppet.RAISE, puppet.RAISE, puppet.NOT_A_DICT, puppet.PRINT):
            try:
                run(instance, what)
            except ExecutionError:
                continue
        eventually(lambda: "model 'm': its words" in caplog.messages, "what was printed last")
    assert caplog.messages.count("model 'm': Traceback (most recent call last):") == 2


def test_errors_over_made_up_inputs_leave_the_traceback_to_real_ones(
    instance: PythonInstance, caplog: pytest.LogCaptureFixture
) -> None:
    made_up = [[np.array([[puppet.RAISE]], np.int64)]]
    with caplog.at_level(logging.INFO, "paceline.models"):
        for _ in range(2):
            with pytest.raises(ExecutionError, match="ValueError"):
                instance.execute_made_up(made_up)
        run(instance, puppet.PRINT)
        eventually(lambda: "model 'm': its words" in caplog.messages, "what was printed after them")
        assert "model 'm': Traceback (most recent call last):" not in caplog.messages
        with pytest.raises(ExecutionError, match="ValueError"):
            run(instance, puppet.RAISE)
        eventually(lambda: "model 'm': Traceback (most recent call last):" in caplog.messages, "the traceback")


def test_async_functions_share_one_loop(folder: Path) -> None:
    text = """
import asyncio
class Model:
    inputs = {"x": ("FP32", [-1, 1])}
    outputs = {"y": ("FP32", [-1, 1])}
    async def load(self, context):
        self.loop = asyncio.get_running_loop()
    async def execute(self, inputs):
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        return {"y": inputs["x"]}
    async def close(self):
        open(__file__ + ".closed", "w").close()
"""
    with serving(folder, text, single("FP32")) as instance:
        (result,) = instance.execute([(np.ones((2, 1), np.float32),)]).results
        assert not isinstance(result, Exception)
        assert result[0].tolist() == [[1], [1]]
    assert (folder / "model.py.closed").exists()
