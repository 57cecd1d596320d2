"""Python models: `backend: "python"`, and a `model.py` in the version's folder.

Lives here: opening one, with a class of ours or one written for Triton. What differs for the latter: the configuration
goes to the model, which may complete it, and comes back with everything filled in before any instance is made. Must
not: run a line of a model's code, which happens in its own processes; know what a configuration means.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

from paceline.backends.base import Device, GroupKind, InstanceGroup, ModelSource, on_cpu, on_gpus
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from paceline.backends.paths import is_file
from paceline.backends.python import EXECUTABLE
from paceline.backends.python.decoupled import DecoupledInstance, DecoupledProcess
from paceline.backends.python.duplex_process import DuplexProcess
from paceline.backends.python.environments import interpreter_of
from paceline.backends.python.instance import OpenInProcesses, PythonInstance
from paceline.backends.python.messages import INITIALIZE, START, TRITON, Declared
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.backends.transport.parcel import Message
from paceline.protos.datatypes import DATATYPES

_log = logging.getLogger("paceline.models")

_OURS, _TRITONS = "Model", "TritonPythonModel"
_LARGEST_DIM = 2**63 - 1
"""Messages can't carry larger ones."""


class PythonModel(OpenInProcesses[ModelProcess]):
    """`OpenModel` of a Python model."""

    platform = "python"

    def __init__(
        self,
        source: ModelSource,
        process: ModelProcess,
        declared: tuple[Declared | None, Declared | None],
        spec: ModelSpec,
    ) -> None:
        super().__init__(source, process)
        self._declared = declared
        self.spec = spec

    def instance(self, spec: ModelSpec, device: Device) -> PythonInstance:
        process = self._take(device)
        if isinstance(process, DecoupledProcess):
            return DecoupledInstance(spec, process)
        return PythonInstance(spec, process)

    def _load(self, process: ModelProcess) -> None:
        if process.load() != self._declared:
            process.close()
            raise LoadError(
                f"model '{self._source.name}': the tensors that its file declares have changed; load it again"
            )


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


class OpenTritonModel(OpenInProcesses[TritonProcess]):
    """`OpenModel` and `CompletesConfig`."""

    platform = "python"

    def __init__(self, source: ModelSource, process: TritonProcess) -> None:
        super().__init__(source, process)
        self._spec: ModelSpec | None = None
        self._config = ""
        self._made = count()
        self.completed_config = process.completed

    @property
    def spec(self) -> ModelSpec:
        if self._spec is None or not self._spec.outputs:
            raise LoadError(
                f"model '{self._source.name}': expected output, and input if it has some, in its configuration or from "
                "its auto_complete_config, each with its data_type"
            )
        return self._spec

    def declare(self, spec: ModelSpec | None) -> None:
        self._spec = spec

    def configure(self, config: str) -> None:
        self._config = config

    def instance(self, spec: ModelSpec, device: Device) -> DecoupledInstance:
        process = self._take(device)
        if not process.is_initialized:
            self._initialize(process)
        return DecoupledInstance(spec, process, as_given=True)

    def _load(self, process: TritonProcess) -> None:
        process.load()
        self._initialize(process)

    def _initialize(self, process: TritonProcess) -> None:
        # Instances are named as Triton names them.
        process.initialize(self._config, f"{self._source.name}_0_{next(self._made)}")


class PythonBackend:
    """`Backend` of models that are Python code. GPUs are only counted: the model is told which one is its own, and
    takes it itself."""

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return tuple(
            device
            for group in groups or (InstanceGroup(),)
            for device in (on_gpus(group, count_gpus()) if group.kind is GroupKind.GPU else on_cpu(group))
        )

    def open(self, source: ModelSource, device: Device) -> PythonModel | OpenTritonModel:
        for asked, what in (
            (source.op_libraries, "libraries of operators"),
            (source.accelerators or source.cpu_accelerators, "execution accelerators"),
        ):
            if asked:
                raise LoadError(f"model '{source.name}': backend 'python' has no use for {what}")
        if not is_file(source.path):
            raise LoadError(f"model '{source.name}': expected a file {source.path.name} in {source.path.parent}")
        with ExitStack() as undo:
            if interpreter := interpreter_of(source, undo):
                source = replace(source, parameters={**source.parameters, EXECUTABLE: interpreter})
            model = self._open(source, device)
            model.when_closed = undo.pop_all()
        return model

    def _open(self, source: ModelSource, device: Device) -> PythonModel | OpenTritonModel:
        if _is_for_triton(source.path):
            triton = TritonProcess(source, device)
            triton.completes = True
            triton.load()
            return OpenTritonModel(source, triton)
        kind = DecoupledProcess if source.decoupled else DuplexProcess if source.calls else ModelProcess
        process = kind(source, device)
        declared = process.load()
        try:
            return PythonModel(source, process, declared, _spec(source, *declared))
        except LoadError:
            process.close()
            raise


def _is_for_triton(path: Path) -> bool:
    """Whether the Python file at `path` has Triton's class, and none of ours. Nothing of it is run."""
    try:
        # Not `ast.parse`: that of Python 3.11 may raise SystemError while other threads do the same.
        code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # its process will say what is wrong with it
    defined = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_NAME"}
    return _TRITONS in defined and _OURS not in defined


def _spec(source: ModelSource, inputs: Declared | None, outputs: Declared | None) -> ModelSpec:
    """What the class declares, or else the configuration."""
    if inputs is None and outputs is None and source.declared is not None:
        return source.declared
    if inputs is None or outputs is None:
        raise LoadError(
            f"model '{source.name}': expected attributes inputs and outputs of its class, or input and output in its "
            "configuration, each with its data_type"
        )
    return ModelSpec(tuple(_tensors(source, "inputs", inputs)), tuple(_tensors(source, "outputs", outputs)))


def _tensors(source: ModelSource, attribute: str, declared: Declared) -> Sequence[TensorSpec]:
    if not declared:
        raise LoadError(f"model '{source.name}': Model.{attribute}: expected one or more, got none")
    for name, datatype, dims in declared:
        where = f"model '{source.name}': Model.{attribute}['{name}']"
        if datatype not in DATATYPES:
            raise LoadError(f"{where}: expected a datatype of {', '.join(DATATYPES)}, got '{datatype}'")
        if not all(-1 <= dim <= _LARGEST_DIM for dim in dims):
            raise LoadError(f"{where}: expected dims from -1 to {_LARGEST_DIM}, got {list(dims)}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise LoadError(f"{where}: expected a name that is UTF-8") from None
    return [TensorSpec(*one) for one in declared]
