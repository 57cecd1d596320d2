"""The server's side of a Python model written for Triton: telling which files are, their processes, and opening one.

Lives here: what differs from our own classes: the configuration goes to the model, which may complete it, and comes
back with everything filled in before any instance is made. Must not: run a line of a model's code in the server, or
know what a configuration means.
"""

from __future__ import annotations

import dis
import logging
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.python.decoupled import DecoupledInstance, DecoupledProcess
from paceline.backends.python.instance import Processes
from paceline.backends.python.messages import INITIALIZE, START, TRITON
from paceline.backends.spec import ModelSpec
from paceline.backends.transport.parcel import Message

__all__ = ["OpenTritonModel", "TritonProcess", "is_for_triton"]

_log = logging.getLogger("paceline.models")

_OURS, _TRITONS = "Model", "TritonPythonModel"


def is_for_triton(path: Path) -> bool:
    """Whether the Python file at `path` has Triton's class, and none of ours. Nothing of it is run."""
    try:
        # Not `ast.parse`: that of Python 3.11 may raise SystemError while other threads do the same.
        code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # its process will say what is wrong with it
    defined = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_NAME"}
    return _TRITONS in defined and _OURS not in defined


class TritonProcess(DecoupledProcess):
    """A process of such a model. `load` has it complete its configuration, if `completes`; then comes `initialize`."""

    _mode = TRITON
    stacks = True
    completes = False

    def __init__(self, source: ModelSource, device: Device) -> None:
        super().__init__(source, device)
        self.completed = ""
        self.is_initialized = False

    def _start(self) -> tuple[object, ...]:
        return *super()._start(), self._source.config, self.completes, _log.isEnabledFor(logging.DEBUG)

    def _loaded_by(self, kind: int, *content: object) -> Message:
        answer = super()._loaded_by(kind, *content)
        if kind == START:
            self.completed = answer[3]
        return answer

    def initialize(self, config: str, instance: str) -> None:
        """Make the model's instance. Blocks. If it raises LoadError, the process has ended."""
        self._loaded_by(INITIALIZE, config, instance)
        self.is_initialized = True


class OpenTritonModel:
    """`OpenModel` and `CompletesConfig`."""

    platform = "python"

    def __init__(self, source: ModelSource, process: TritonProcess) -> None:
        self._source = source
        self._processes = Processes(source, process, self._load)
        self.when_closed = ExitStack()
        """What is done when it is closed."""
        self._spec: ModelSpec | None = None
        self._config = ""
        self._made = count()
        self.completed_config = process.completed

    @property
    def spec(self) -> ModelSpec:
        if self._spec is None:
            raise LoadError(
                f"model '{self._source.name}': expected input and output in its configuration or from its "
                "auto_complete_config, each with its data_type"
            )
        return self._spec

    def declare(self, spec: ModelSpec | None) -> None:
        self._spec = spec

    def configure(self, config: str) -> None:
        self._config = config

    def instance(self, spec: ModelSpec, device: Device) -> DecoupledInstance:
        process = self._processes.take(device)
        if not process.is_initialized:
            process.initialize(self._config, self._name())
        return DecoupledInstance(spec, process)

    def abandon(self) -> None:
        """`Abandonable`: end the processes that are loading now."""
        self._processes.abandon()

    def close(self) -> None:
        self._processes.close()
        self.when_closed.close()

    def _load(self, process: TritonProcess) -> None:
        process.load()
        process.initialize(self._config, self._name())

    def _name(self) -> str:
        """The name of the next instance, as Triton makes them."""
        return f"{self._source.name}_0_{next(self._made)}"


def open_for_triton(source: ModelSource, device: Device) -> OpenTritonModel:
    """Blocks; raises LoadError."""
    process = TritonProcess(source, device)
    process.completes = True
    process.load()
    return OpenTritonModel(source, process)
