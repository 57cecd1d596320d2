"""Python models in processes of their own: what they are told, what they may get wrong, and how processes end."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import threading
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.base import (
    MISSING,
    Array,
    BatchInput,
    BatchInputKind,
    Device,
    DeviceKind,
    GroupKind,
    InstanceGroup,
    ModelInstance,
    ModelSource,
    ModelSpec,
    TensorSpec,
)
from backends.errors import ExecutionError, LoadError, ProcessError, SessionError
from backends.python.backend import PythonBackend
from backends.python.instance import PythonInstance
from backends.python.process import ModelProcess
from tests import puppet
from tests.polling import eventually

CPU = Device(DeviceKind.CPU)
SINGLE = ModelSpec((TensorSpec("x", "INT64", (1,)),), (TensorSpec("y", "INT64", (1,)),), batched=True)
SPEC = ModelSpec((TensorSpec("INPUT0", "INT64", (1,)),), (TensorSpec("OUTPUT0", "INT64", (1,)),), batched=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "1"


@pytest.fixture
def instance(folder: Path) -> Iterator[PythonInstance]:
    """Of the puppet."""
    model = PythonBackend().open(ModelSource("m", puppet.write_puppet(folder)), CPU)
    made = model.instance(SPEC, CPU)
    yield made
    made.close()
    model.close()


def request(*elements: int) -> tuple[Array, ...]:
    return (np.array(elements, np.int64).reshape(-1, 1),)


def run(instance: ModelInstance, *elements: int) -> list[int]:
    (result,) = instance.execute([request(*elements)]).results
    assert not isinstance(result, Exception)
    numbers: list[int] = result[0].ravel().tolist()
    return numbers


def loads(folder: Path) -> list[str]:
    return (folder / "loads").read_text().splitlines()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def open_model(folder: Path, text: str, declared: ModelSpec | None = None, **parameters: str) -> object:
    """Open the model of that text, and close it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(text)
    source = ModelSource("m", folder / "model.py", declared, parameters)
    model = PythonBackend().open(source, CPU)
    model.close()
    return model.spec


def failure(folder: Path, text: str) -> str:
    with pytest.raises(LoadError) as caught:
        open_model(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CLASS = """
class Model:
    inputs = {"x": ("FP32", [-1, 4])}
    outputs = {"y": ("FP32", [-1])}
    def execute(self, inputs):
        return {"y": inputs["x"].sum(axis=1)}
"""


def test_spec_is_what_the_class_declares(folder: Path) -> None:
    assert open_model(folder, CLASS) == ModelSpec(
        (TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1,)),)
    )


def test_spec_of_a_class_that_declares_nothing_is_that_of_the_configuration(folder: Path) -> None:
    declared = ModelSpec((TensorSpec("a", "BYTES", (-1,)),), (TensorSpec("b", "BOOL", (-1,)),))
    assert open_model(folder, "class Model:\n    def execute(self, inputs): pass", declared) is declared


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_to_be_found", f"No module named 'nowhere_to_be_found' .its interpreter is {sys.executable}"),
        ("class Model(:", r"SyntaxError: invalid syntax \(model.py, line 1\)"),
        ("x = 1", "AttributeError: expected a class Model in model.py, got none"),
        ("class TritonPythonModel: pass", "expected a class Model in model.py, got Triton's TritonPythonModel"),
        ("class Model: pass", r"expected a method execute\(self, inputs\) of class Model in model.py, got none"),
        ("raise SystemExit('no more')", "SystemExit: no more"),
        ("import os; print('the last'); os._exit(7)", "its process ended with exit status 7 while loading: the last"),
        (f"{CLASS}    def __init__(self): raise ValueError('two\\nlines')", "model 'm': ValueError: two lines"),
        (f"{CLASS}    def load(self, context): return context.nothing", "AttributeError: .*nothing"),
        (f"{CLASS}    async def load(self, context): raise KeyError('later')", "KeyError: later"),
        (CLASS.replace('"FP32", [-1])', '"FP33", [-1])'), r"Model.outputs\['y'\]: expected a datatype of BOOL, .*FP33"),
        (CLASS.replace("[-1])", "[-2])"), r"Model.outputs\['y'\]: expected dims >= -1, got \[-2\]"),
        (CLASS.replace('{"y": ("FP32", [-1])}', '["y"]'), r"Model.outputs: expected a dict such as .*, got \['y'\]"),
        (CLASS.replace('{"y": ("FP32", [-1])}', "{}"), "Model.outputs: expected one or more, got none"),
        (CLASS.replace("outputs =", "other ="), "expected attributes inputs and outputs of its class"),
        ("class Model:\n    def execute(self, inputs): pass", "expected attributes inputs and outputs of its class"),
    ],
)  # fmt: skip
def test_load_that_fails_says_why_in_a_line(folder: Path, text: str, words: str) -> None:
    assert re.search(words, failure(folder, text))


def test_load_without_a_file_says_where_it_was_expected(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=f"expected a file model.py in {tmp_path}"):
        PythonBackend().open(ModelSource("m", tmp_path / "model.py"), CPU)


def test_load_with_what_is_of_no_use_is_refused(folder: Path) -> None:
    source = ModelSource("m", puppet.write_puppet(folder), op_libraries=(folder / "a.so",))
    with pytest.raises(LoadError, match="no use for libraries of operators"):
        PythonBackend().open(source, CPU)
    with pytest.raises(LoadError, match="no use for execution accelerators"):
        PythonBackend().open(replace(source, op_libraries=(), accelerators=(("cuda", {}),)), CPU)


def test_load_with_an_interpreter_that_is_none_is_refused(folder: Path) -> None:
    source = ModelSource("m", puppet.write_puppet(folder), parameters={"paceline.python_executable": "bin/python"})
    with pytest.raises(LoadError, match=f"{folder}/bin/python can't be run: No such file"):
        PythonBackend().open(source, CPU)


def test_load_gets_the_context_and_files_beside_the_model_can_be_imported(folder: Path) -> None:
    folder.mkdir()
    (folder / "beside.py").write_text(
        "def words(context): return [context.name, context.device, context.parameters['a']]"
    )
    text = f"import beside\n{CLASS}    def load(self, context): raise ValueError(*beside.words(context))"
    with pytest.raises(LoadError, match=r"\('m', 'cpu', 'b'\)"):
        open_model(folder, text, a="b")
    assert sorted(path.name for path in folder.iterdir()) == ["beside.py", "model.py"], "nothing is written there"


def test_interpreter_of_another_environment_needs_nothing_but_numpy(folder: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    there = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (there / name).exists():
            (packages / name).symlink_to(there / name)
    (packages / "only_there.py").write_text("")
    text = f"""
import sys, only_there
{CLASS}
    def load(self, context):
        try:
            import google.protobuf
        except ImportError:
            return
        raise ValueError("the server's packages are in its path: " + str(sys.path))
"""
    open_model(folder, text, **{"paceline.python_executable": "../venv/bin/python"})


def test_interpreter_without_numpy_says_so(folder: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    with pytest.raises(LoadError, match="exit status 1 while loading: ModuleNotFoundError: No module named 'numpy'"):
        open_model(folder, CLASS, **{"paceline.python_executable": str(tmp_path / "venv" / "bin" / "python")})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (puppet.RAISE, "^ValueError: this is no good$"),
        (puppet.ROWS, r"expected shape \[2, 1\], got \[0, 1\]; the first dimension of every output must be"),
        (puppet.TYPE, "output 'OUTPUT0': expected INT64, got numpy's float64"),
        (puppet.NOT_A_DICT, "TypeError: execute: expected a dict of outputs by name, got list"),
        (puppet.MISSING_OUTPUT, r"KeyError: execute: expected output 'OUTPUT0', got only \['OUTPUT1'\]"),
    ],
)
def test_execute_that_goes_wrong_says_how_and_the_process_goes_on(
    instance: PythonInstance, what: int, words: str
) -> None:
    (pid,) = run(instance, puppet.PID)
    with pytest.raises(ExecutionError, match=words) as caught:
        run(instance, 1, what)
    assert not isinstance(caught.value, SessionError)
    assert run(instance, puppet.PID) == [pid]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ('ValueError("begin" + 10_000_000 * "o" + "end")', "^ValueError: begino{9,4000} .* o{9,4000}end$"),
        ("Wordless()", "^Wordless$"),
        ('ValueError("\\ud800")', "^ValueError: .*"),
        ('ExceptionGroup("several", [ValueError("a")])', r"^ExceptionGroup: several \(1 sub-exception\)$"),
    ],
)
def test_exception_whatever_its_words_is_told_in_a_bounded_line_and_the_process_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, error: str, words: str
) -> None:
    fails = f"""
class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Model:
    inputs = {{"x": ("INT64", [-1, 1])}}
    outputs = {{"y": ("INT64", [-1, 1])}}

    def execute(self, inputs):
        if inputs["x"].any():
            raise {error}
        return {{"y": inputs["x"]}}
"""
    folder.mkdir()
    (folder / "model.py").write_text(fails)
    instance = PythonBackend().open(ModelSource("m", folder / "model.py"), CPU).instance(SINGLE, CPU)
    with caplog.at_level(logging.INFO, "paceline.models"):
        try:
            with pytest.raises(ExecutionError, match=words):
                run(instance, 1)
            assert run(instance, 0) == [0]
        finally:
            instance.close()
    eventually(lambda: any("Traceback" in line for line in caplog.messages), "the traceback")
    assert sum(map(len, caplog.messages)) < 50_000


def test_execute_out_of_memory_is_no_requests_fault(instance: PythonInstance) -> None:
    with pytest.raises(SessionError, match="MemoryError: all gone"):
        run(instance, puppet.MEMORY)
    assert run(instance, 2) == [20]


def test_execute_after_many_large_batches_has_all_memory_again(instance: PythonInstance) -> None:
    elements = np.arange(100_000, dtype=np.int64).reshape(-1, 1)
    for _ in range(20):
        (result,) = instance.execute([(elements,)]).results
        assert not isinstance(result, Exception)
        np.testing.assert_array_equal(result[0], elements * 10)
    del result
    assert run(instance, 1) == [10]
    process = instance._process
    assert process is not None
    assert process._line.used_bytes == 0


def test_execute_text_is_encoded_and_anything_else_refused(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.py").write_text("""
class Model:
    inputs = {"x": ("BYTES", [-1, 1])}
    outputs = {"y": ("BYTES", [-1, 1])}
    def execute(self, inputs):
        return {"y": [[{b"text": "t\u00e9xt", b"bytes": b"a\\0", b"none": None}[row[0]]] for row in inputs["x"]]}
""")
    model = PythonBackend().open(ModelSource("m", folder / "model.py"), CPU)
    spec = ModelSpec((TensorSpec("x", "BYTES", (1,)),), (TensorSpec("y", "BYTES", (1,)),), batched=True)
    instance = model.instance(spec, CPU)
    execution = instance.execute([(np.array([[b"text"], [b"bytes"]], object),)])
    assert [array.tolist() for (array,) in execution.results] == [[["t\u00e9xt".encode()], [b"a\0"]]]
    with pytest.raises(ExecutionError, match="output 'y': expected numbers of one datatype, or bytes, got NoneType"):
        instance.execute([(np.array([[b"none"]], object),)])
    instance.close()
    model.close()


def test_execute_inputs_that_are_left_out_or_made_per_batch_are_in_the_dict_by_name(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.py").write_text("""
class Model:
    inputs = {"a": ("FP32", [-1]), "b": ("FP32", [-1, 1]), "ends": ("INT32", [-1])}
    outputs = {"y": ("FP32", [-1, 1])}
    def execute(self, inputs):
        rows = [part.sum() for part in __import__("numpy").split(inputs["a"], inputs["ends"])[:-1]]
        y = __import__("numpy").array(rows, "f4")[:, None]
        return {"y": y + inputs["b"] if "b" in inputs else y}
""")
    model = PythonBackend().open(ModelSource("m", folder / "model.py"), CPU)
    spec = ModelSpec(
        (TensorSpec("a", "FP32", (-1,), ragged=True), TensorSpec("b", "FP32", (1,), optional=True)),
        (TensorSpec("y", "FP32", (1,)),),
        batched=True,
        batch_inputs=(BatchInput(BatchInputKind.ACCUMULATED_ELEMENT_COUNT, ("ends",), "INT32", "a"),),
    )
    instance = model.instance(spec, CPU)
    first, second = (np.ones((1, size), np.float32) for size in (3, 5))
    without = instance.execute([(first, MISSING), (second, MISSING)]).results
    assert [array.tolist() for (array,) in without] == [[[3]], [[5]]]
    ten = np.full((1, 1), 10, np.float32)
    assert [array.tolist() for (array,) in instance.execute([(first, ten), (second, ten)]).results] == [[[13]], [[15]]]
    instance.close()
    model.close()


@pytest.mark.parametrize(
    ("what", "words"), [(puppet.EXIT, "ended with exit status 3"), (puppet.SEGFAULT, "was killed by SIGSEGV")]
)
def test_crash_fails_its_batch_and_the_next_one_is_answered_by_another_process(
    instance: PythonInstance, folder: Path, what: int, words: str
) -> None:
    (pid,) = run(instance, puppet.PID)
    for _ in range(2):
        with pytest.raises(ProcessError, match=f"^the model's process {words} while it executed this batch$"):
            run(instance, what)
        assert run(instance, 4) == [40]
    assert len(set(loads(folder))) == 3
    assert run(instance, puppet.PID) != [pid]
    assert not is_alive(pid)


def test_death_of_an_idle_process_costs_no_request(instance: PythonInstance, folder: Path) -> None:
    for number in range(2, 5):
        (pid,) = run(instance, puppet.PID)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not is_alive(pid), "the process gone")  # type: ignore[misc]
        assert run(instance, 4) == [40]
        assert len(loads(folder)) == number


def test_crash_whose_successor_cannot_load_is_told_and_tried_again(instance: PythonInstance, folder: Path) -> None:
    (folder / "broken").touch()
    with pytest.raises(ProcessError, match="ended with exit status 3"):
        run(instance, puppet.EXIT)
    for _ in range(2):
        with pytest.raises(ProcessError, match="can't be started again: model 'm': RuntimeError: it is broken"):
            run(instance, 1)
    (folder / "broken").unlink()

    def answers() -> bool:
        try:
            return run(instance, 1) == [10]
        except ProcessError:
            return False

    eventually(answers, "an answer")


def test_crash_whose_successor_declares_something_else_is_told(instance: PythonInstance, folder: Path) -> None:
    path = folder / "model.py"
    path.write_text(path.read_text().replace('"INT64", [-1, 1]', '"FP32", [-1, 1]'))
    with pytest.raises(ProcessError):
        run(instance, puppet.EXIT)
    with pytest.raises(ProcessError, match="its file declares other tensors now; load it again"):
        run(instance, 1)


@pytest.mark.parametrize("what", [puppet.HANG, puppet.GRAB])
def test_instance_that_hangs_and_is_abandoned_fails_its_batch_and_ends(
    instance: PythonInstance, folder: Path, what: int
) -> None:
    (pid,) = run(instance, puppet.PID)
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(run, instance, what)
        eventually((folder / "hangs").exists, "the model hanging")
        instance.abandon()
        with pytest.raises(ProcessError, match="was killed by SIGKILL while it executed this batch"):
            hanging.result(20)
    assert not is_alive(pid)
    with pytest.raises(ExecutionError, match="the instance is closed"):
        run(instance, 1)
    assert len(loads(folder)) == 1, "no other process is started"


def test_signals_that_ask_a_group_to_end_are_left_to_the_server(instance: PythonInstance) -> None:
    (pid,) = run(instance, puppet.PID)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert run(instance, puppet.PID) == [pid]


def test_output_goes_to_the_log_with_the_models_name(
    instance: PythonInstance, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline.models"):
        run(instance, puppet.PRINT)
        eventually(lambda: "model 'm': its words" in caplog.messages, "both lines in the log")
    assert "model 'm': these are" in caplog.messages


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


def test_close_calls_the_models_own_and_leaves_nothing_behind(folder: Path) -> None:
    gc.collect()
    # By name and not by number: of what is there some goes, as processes of earlier tests are still being tidied up.
    before = _held()
    source = ModelSource("m", puppet.write_puppet(folder))
    model = PythonBackend().open(source, CPU)
    instances = [model.instance(SPEC, CPU) for _ in range(2)]
    pids = [run(instance, puppet.PID)[0] for instance in instances]
    for instance in instances:
        instance.close()
    model.close()
    assert (folder / "closed").exists()
    assert not any(map(is_alive, pids))
    with pytest.raises(ExecutionError, match="the instance is closed"):
        run(instances[0], 1)
    del instances, instance, model
    gc.collect()
    eventually(lambda: _held() <= before, "nothing that wasn't there before")


def test_closed_instance_has_no_memory_although_somebody_knows_it(instance: PythonInstance) -> None:
    """A batcher, say, until the garbage collector comes by."""
    before = _memory()
    run(instance, 1)
    assert before
    gc.disable()
    try:
        instance.close()
        eventually(lambda: not before & _memory(), "its memory is given back")
    finally:
        gc.enable()


def _memory() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "paceline-tensors" in line}


def _held() -> set[object]:
    """This process's descriptors with the files behind them, its threads, and what it maps of tensors."""
    held: set[object] = {*threading.enumerate()}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, as that of the listing is
            file = os.stat(f"/proc/self/fd/{descriptor}")
            held.add((descriptor, file.st_dev, file.st_ino))
    return held | _memory()


def test_close_that_takes_too_long_is_ended(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.py").write_text(f"{CLASS}    def close(self): __import__('threading').Event().wait()")
    process = ModelProcess(ModelSource("m", folder / "model.py"), CPU, close_s=0.1)
    process.load()
    process.close()
    assert process.end == "was killed by SIGKILL"
    assert not is_alive(process.pid)


def test_close_while_a_successor_is_being_loaded_ends_it(instance: PythonInstance, folder: Path) -> None:
    path = folder / "model.py"
    path.write_text(
        f"import pathlib, threading\npathlib.Path({str(folder / 'waits')!r}).touch()\nthreading.Event().wait()"
    )
    with pytest.raises(ProcessError):
        run(instance, puppet.EXIT)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(run, instance, 1)
        eventually((folder / "waits").exists, "the successor loading")
        starting = instance._starting
        assert starting is not None
        instance.close()
        with pytest.raises((ExecutionError, ProcessError)):
            waiting.result(20)
    eventually(lambda: not is_alive(starting.pid), "the successor gone")


def test_what_the_model_has_started_goes_with_its_process(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.py").write_text(f"""
import subprocess, sys
{CLASS.replace("FP32", "INT64")}
    def load(self, context):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    def execute(self, inputs):
        return {{"y": inputs["x"][:, 0] * 0 + self.child.pid}}
""")
    model = PythonBackend().open(ModelSource("m", folder / "model.py"), CPU)
    spec = ModelSpec((TensorSpec("x", "INT64", (4,)),), (TensorSpec("y", "INT64", ()),), batched=True)
    instance = model.instance(spec, CPU)
    (result,) = instance.execute([(np.zeros((1, 4), np.int64),)]).results
    assert not isinstance(result, Exception)
    (pid,) = result[0].tolist()
    assert is_alive(pid)
    instance.close()
    model.close()
    eventually(lambda: not is_alive(pid) or _is_zombie(pid), "what it has started gone")


def _is_zombie(pid: int) -> bool:
    """Whoever has to reap it is none of ours."""
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_async_functions_share_one_loop(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.py").write_text("""
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
""")
    model = PythonBackend().open(ModelSource("m", folder / "model.py"), CPU)
    spec = ModelSpec((TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), batched=True)
    instance = model.instance(spec, CPU)
    (result,) = instance.execute([(np.ones((2, 1), np.float32),)]).results
    assert not isinstance(result, Exception)
    assert result[0].tolist() == [[1], [1]]
    instance.close()
    model.close()
    assert (folder / "model.py.closed").exists()


def test_devices_are_one_cpu_by_default_and_gpus_where_there_are_some() -> None:
    backend = PythonBackend()
    assert backend.devices([]) == (CPU,)
    assert backend.devices([InstanceGroup(GroupKind.MODEL, 3)]) == (CPU,) * 3


def test_interpreter_is_the_servers_by_default(folder: Path) -> None:
    text = f"import sys\n{CLASS}    def load(self, context): raise ValueError(sys.executable)"
    assert failure(folder, text) == f"model 'm': ValueError: {sys.executable}"
