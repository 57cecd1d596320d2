"""Python models: `backend: "python"`, and a `model.py` in the version's folder.

Lives here: opening one. Must not: run a line of its code; that happens in the model's own processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from paceline.backends.base import Device, GroupKind, InstanceGroup, ModelSource, on_cpu, on_gpus
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from paceline.backends.paths import is_file
from paceline.backends.python import EXECUTABLE
from paceline.backends.python.decoupled import DecoupledInstance, DecoupledProcess
from paceline.backends.python.duplex_process import DuplexProcess
from paceline.backends.python.environments import interpreter_of
from paceline.backends.python.instance import Processes, PythonInstance
from paceline.backends.python.messages import Declared
from paceline.backends.python.process import ModelProcess
from paceline.backends.python.triton_opened import OpenTritonModel, is_for_triton, open_for_triton
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos.datatypes import DATATYPES

_LARGEST_DIM = 2**63 - 1
"""Messages can't carry larger ones."""


class PythonModel:
    """`OpenModel` of a Python model. `process` has loaded it already, and becomes that of the first instance."""

    platform = "python"

    def __init__(
        self,
        source: ModelSource,
        process: ModelProcess,
        declared: tuple[Declared | None, Declared | None],
        spec: ModelSpec,
    ) -> None:
        self._source = source
        self._declared = declared
        self.spec = spec
        self._processes = Processes(source, process, self._load)
        self.when_closed = ExitStack()
        """What is done when it is closed."""

    def instance(self, spec: ModelSpec, device: Device) -> PythonInstance:
        process = self._processes.take(device)
        if isinstance(process, DecoupledProcess):
            return DecoupledInstance(spec, process)
        return PythonInstance(spec, process)

    def abandon(self) -> None:
        """`Abandonable`: end the processes that are loading now."""
        self._processes.abandon()

    def close(self) -> None:
        self._processes.close()
        self.when_closed.close()

    def _load(self, process: ModelProcess) -> None:
        if process.load() != self._declared:
            process.close()
            raise LoadError(
                f"model '{self._source.name}': the tensors that its file declares have changed; load it again"
            )


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
        if is_for_triton(source.path):
            return open_for_triton(source, device)
        kind = DecoupledProcess if source.decoupled else DuplexProcess if source.calls else ModelProcess
        process = kind(source, device)
        declared = process.load()
        try:
            return PythonModel(source, process, declared, _spec(source, *declared))
        except LoadError:
            process.close()
            raise


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
