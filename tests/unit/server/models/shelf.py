"""Models in folders, a backend that opens them without reading any, and which of them are still open.

Lives here: what the tests of the loader load. Must not: assertions about behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.backends.base import Backend, Device, InstanceGroup, ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from paceline.server.models.layout import ModelFolder
from tests.memory_models import MemoryInstance, MemoryModel
from tests.unit.server.found import find_models

__all__ = ["SPEC", "Model", "VersionBackend", "folder"]

SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))


class Model(MemoryModel):
    """A model that makes instances until `instances` are open, and then fails to."""

    def __init__(
        self,
        instances: int = 100,
        spec: ModelSpec = SPEC,
        compute: Callable[[Tensors], Tensors] = lambda inputs: inputs,
    ) -> None:
        super().__init__(spec, compute)
        self._limit = instances

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        if self.open_instances == self._limit:
            raise LoadError("no room for another instance")
        return super().instance(spec, device)


class VersionBackend:
    """A backend that opens a model for each version, the given one or a new one, and records what it was asked for."""

    def __init__(self, **versions: Model | Exception) -> None:
        self._given = versions
        self.sources: list[ModelSource] = []
        self.opened: dict[str, Model] = {}

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return (Device(),) * max(1, sum(group.count for group in groups))

    def open(self, source: ModelSource, device: Device) -> Model:
        self.sources.append(source)
        version = source.path.parent.name
        model = self._given.get(f"v{version}") or Model()
        if isinstance(model, Exception):
            raise model
        self.opened[version] = model
        return model

    def of(self, name: str) -> Backend:
        assert name == "onnxruntime"
        return self

    @property
    def leaked(self) -> list[str]:
        """Versions of which something is still open."""
        return [version for version, model in self.opened.items() if model.open_instances or not model.closed]


def folder(tmp_path: Path, *versions: int, config: str | None = None) -> ModelFolder:
    for version in versions:
        (tmp_path / "m" / str(version)).mkdir(parents=True)
    (tmp_path / "m").mkdir(exist_ok=True)
    if config is not None:
        (tmp_path / "m" / "config.pbtxt").write_text(config)
    (model,) = find_models([tmp_path])
    return model
