"""Loading Python models: what they declare, what they are given, and the errors of those that can't be loaded."""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
import threading
import venv
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import Device, DeviceKind, GroupKind, InstanceGroup
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from paceline.backends.python.backend import PythonBackend
from paceline.backends.spec import ModelSpec, TensorSpec
from tests import puppet
from tests.rlimits import limited
from tests.unit.backends.python_models import CLASS, CPU, model_source


def open_model(folder: Path, text: str, declared: ModelSpec | None = None, **parameters: str) -> object:
    """The spec of a model with that text, which is opened and closed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(text)
    source = model_source(folder / "model.py", declared, parameters)
    model = PythonBackend().open(source, CPU)
    model.close()
    return model.spec


def failure(folder: Path, text: str) -> str:
    with pytest.raises(LoadError) as caught:
        open_model(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
        ("x = 1", "AttributeError: expected a class Model, or Triton's TritonPythonModel, in model.py, got none"),
        ("class TritonPythonModel: pass", r"expected a method execute\(self, requests\) of class TritonPythonModel"),
        ("class Model: pass", r"expected a method execute\(self, inputs\) of class Model in model.py, got none"),
        ("raise SystemExit('no more')", "SystemExit: no more"),
        ("import os; print('the last'); os._exit(7)", "its process ended with exit status 7 while loading: the last"),
        (f"{CLASS}    def __init__(self): raise ValueError('two\\nlines')", "model 'm': ValueError: two lines"),
        (f"{CLASS}    def load(self, context): return context.nothing", "AttributeError: .*nothing"),
        (f"{CLASS}    async def load(self, context): raise KeyError('later')", "KeyError: later"),
        (CLASS.replace('"FP32", [-1])', '"FP33", [-1])'), r"Model.outputs\['y'\]: expected a datatype of BOOL, .*FP33"),
        (CLASS.replace("[-1])", "[-2])"), r"Model.outputs\['y'\]: expected dims from -1 to .*, got \[-2\]"),
        (CLASS.replace("[-1])", "[2**63])"), r"expected dims from -1 to .*, got \[9223372036854775808\]"),
        (CLASS.replace("[-1])", "[2.7])"), r"Model.outputs: expected a dict .* \('FP32', \[2.7\]\)}"),
        (CLASS.replace('"y": (', r'"\udcff": ('), "Model.outputs.*: expected a name that is UTF-8"),
        (CLASS.replace('{"y": ("FP32", [-1])}', '["y"]'), r"Model.outputs: expected a dict such as .*, got \['y'\]"),
        (CLASS.replace('{"y": ("FP32", [-1])}', "{}"), "Model.outputs: expected one or more, got none"),
        (CLASS.replace("outputs =", "other ="), "expected attributes inputs and outputs of its class"),
        ("class Model:\n    def execute(self, inputs): pass", "expected attributes inputs and outputs of its class"),
    ],
)  # fmt: skip
def test_failed_load_says_why_in_one_line(folder: Path, text: str, words: str) -> None:
    assert re.search(words, failure(folder, text))


def test_load_without_a_file_says_where_it_was_expected(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=f"expected a file model.py in {tmp_path}"):
        PythonBackend().open(model_source(tmp_path / "model.py"), CPU)


def test_load_with_operator_libraries_or_accelerators_is_refused(folder: Path) -> None:
    source = model_source(puppet.write_puppet(folder), op_libraries=(folder / "a.so",))
    with pytest.raises(LoadError, match="no use for libraries of operators"):
        PythonBackend().open(source, CPU)
    with pytest.raises(LoadError, match="no use for execution accelerators"):
        PythonBackend().open(replace(source, op_libraries=(), accelerators=(("cuda", {}),)), CPU)


def test_load_with_a_missing_interpreter_is_refused(folder: Path) -> None:
    source = model_source(puppet.write_puppet(folder), parameters={"paceline.python_executable": "bin/python"})
    with pytest.raises(LoadError, match=f"{folder}/bin/python can't be run: No such file"):
        PythonBackend().open(source, CPU)


def test_load_with_an_impossible_interpreter_path_leaves_no_descriptor_open(folder: Path) -> None:
    source = model_source(puppet.write_puppet(folder), parameters={"paceline.python_executable": "a\0b"})
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(LoadError, match="can't be run: embedded null byte"):
            PythonBackend().open(source, CPU)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_load_without_room_for_its_connection_is_refused(folder: Path) -> None:
    source = model_source(puppet.write_puppet(folder))
    words = "model 'm': no connection to its process: File too large"
    with limited(resource.RLIMIT_FSIZE, 1), pytest.raises(LoadError, match=words):
        PythonBackend().open(source, CPU)


def children() -> set[str]:
    """The processes that this one has started and hasn't reaped."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # any may end meanwhile
            _, parent, *_ = path.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                found.add(path.parent.name)
    return found


@pytest.mark.parametrize("started", [0, 1])
def test_load_with_too_few_threads_is_refused_and_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    source = model_source(puppet.write_puppet(folder))
    before, descriptors, start = children(), len(list(Path("/proc/self/fd").iterdir())), threading.Thread.start
    threads: list[threading.Thread] = []

    def start_few(thread: threading.Thread) -> None:
        if len(threads) == started:
            raise RuntimeError("can't start new thread")
        threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with pytest.raises(LoadError, match="model 'm': its process can't be watched: can't start new thread"):
        PythonBackend().open(source, CPU)
    assert children() <= before
    gc.collect()  # a thread that didn't start is part of a reference cycle
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_load_gets_the_context_and_files_beside_the_model_can_be_imported(folder: Path) -> None:
    folder.mkdir()
    (folder / "beside.py").write_text(
        "def words(context): return [context.name, context.device, context.parameters['a']]"
    )
    text = f"import beside\n{CLASS}    def load(self, context): raise ValueError(*beside.words(context))"
    with pytest.raises(LoadError, match=r"\('m', 'cpu', 'b'\)"):
        open_model(folder, text, a="b")
    assert sorted(path.name for path in folder.iterdir()) == ["beside.py", "model.py"], "nothing is written there"


def test_interpreter_of_another_environment_needs_only_numpy(folder: Path, tmp_path: Path) -> None:
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


def test_interpreter_without_numpy_is_refused(folder: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    with pytest.raises(LoadError, match="exit status 1 while loading: ModuleNotFoundError: No module named 'numpy'"):
        open_model(folder, CLASS, **{"paceline.python_executable": str(tmp_path / "venv" / "bin" / "python")})


def test_devices_are_one_cpu_by_default_and_as_many_as_instances_for_kind_model() -> None:
    backend = PythonBackend()
    assert backend.devices([]) == (CPU,)
    assert backend.devices([InstanceGroup(GroupKind.MODEL, 3)]) == (CPU,) * 3


@pytest.mark.gpu
def test_devices_with_gpus_are_gpus_for_kind_gpu_and_otherwise_the_cpu() -> None:
    try:
        gpus = count_gpus()
    except LoadError as error:
        pytest.skip(str(error))
    backend = PythonBackend()
    assert backend.devices([InstanceGroup(GroupKind.GPU)]) == tuple(Device(DeviceKind.GPU, one) for one in range(gpus))
    for kind in (GroupKind.AUTO, GroupKind.MODEL, GroupKind.CPU):
        assert backend.devices([InstanceGroup(kind, 2)]) == (CPU, CPU)


def test_interpreter_is_the_servers_by_default(folder: Path) -> None:
    text = f"import sys\n{CLASS}    def load(self, context): raise ValueError(sys.executable)"
    assert failure(folder, text) == f"model 'm': ValueError: {sys.executable}"


def test_arguments_of_the_process_are_not_the_codes(folder: Path) -> None:
    open_model(folder, f"import sys\nassert not sys.argv[1:], sys.argv\n{CLASS}")


def test_fork_that_returns_from_load_sends_no_answer(folder: Path) -> None:
    fork = """
    def load(self, context):
        import os, sys
        if os.fork() == 0:
            sys.exit("no such command")
        os.wait()
"""
    open_model(folder, CLASS + fork)
