"""How the processes of Python models die, are replaced, and end."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import termios
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from backends.base import ModelSource, ModelSpec, TensorSpec
from backends.errors import ExecutionError, LoadError, ProcessError
from backends.python.backend import PythonBackend
from backends.python.instance import PythonInstance
from backends.python.process import ModelProcess
from backends.transport.line import Line
from tests import puppet
from tests.polling import eventually
from tests.unit.backends.python_models import CLASS, CPU, SPEC, is_alive, run, serving


def unread_bytes(line: Line) -> int:
    """Of what was sent, by what the kernel keeps of it."""
    kept = array("i", [0])
    fcntl.ioctl(line._socket, termios.TIOCOUTQ, kept)
    return kept[0]


def loads(folder: Path) -> list[str]:
    return (folder / "loads").read_text().splitlines()


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


def test_death_of_a_process_that_had_not_begun_costs_no_request(instance: PythonInstance, folder: Path) -> None:
    for number in range(2, 5):
        (pid,) = run(instance, puppet.PID)
        os.kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as asking:
            answer = asking.submit(run, instance, 4)
            line = instance._process._line  # type: ignore[union-attr]
            eventually(lambda line=line: unread_bytes(line) > 0, "the batch is on its way")  # type: ignore[misc]
            os.kill(pid, signal.SIGKILL)
            assert answer.result(30) == [40]
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


def test_model_that_is_abandoned_while_an_instance_is_being_loaded_ends_it(folder: Path) -> None:
    text = f"""
import pathlib, threading
HERE = pathlib.Path(__file__).parent
{CLASS}
    def load(self, context):
        if (HERE / "slow").exists():
            (HERE / "slow").unlink()
            threading.Event().wait()
"""
    folder.mkdir()
    (folder / "model.py").write_text(text)
    model = PythonBackend().open(ModelSource("m", folder / "model.py"), CPU)
    first = model.instance(model.spec, CPU)
    (folder / "slow").touch()
    with ThreadPoolExecutor(1) as loading:
        second = loading.submit(model.instance, model.spec, CPU)
        eventually(lambda: not (folder / "slow").exists(), "it loads")
        model.abandon()
        with pytest.raises(LoadError, match="was killed by SIGKILL while loading"):
            second.result(30)
    with pytest.raises(LoadError, match="its process"):
        model.instance(model.spec, CPU)
    first.close()
    model.close()


def test_signals_that_ask_a_group_to_end_are_left_to_the_server(instance: PythonInstance) -> None:
    (pid,) = run(instance, puppet.PID)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert run(instance, puppet.PID) == [pid]


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
    gc.collect()  # what errors of other tests have kept
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
    text = f"""
import subprocess, sys
{CLASS.replace("FP32", "INT64")}
    def load(self, context):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    def execute(self, inputs):
        return {{"y": inputs["x"][:, 0] * 0 + self.child.pid}}
"""
    spec = ModelSpec((TensorSpec("x", "INT64", (4,)),), (TensorSpec("y", "INT64", ()),), batched=True)
    with serving(folder, text, spec) as instance:
        (result,) = instance.execute([(np.zeros((1, 4), np.int64),)]).results
        assert not isinstance(result, Exception)
        (pid,) = result[0].tolist()
        assert is_alive(pid)
    eventually(lambda: not is_alive(pid) or _is_zombie(pid), "what it has started gone")


def _is_zombie(pid: int) -> bool:
    """Whoever has to reap it is none of ours."""
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()
