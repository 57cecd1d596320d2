"""A repository of models in memory."""

from __future__ import annotations

from pathlib import Path

from paceline.backends.base import Backend
from paceline.backends.errors import LoadError
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.server.models.load_queue import LoadQueue
from paceline.server.models.repository import Repository
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.trace_settings import TraceConfig
from paceline.server.telemetry.tracing import Tracer
from tests.memory_models import MemoryBackend, MemoryModel
from tests.unit.server.found import find_models

MAX_MODELS = 10
SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))


class Bench:
    """A repository over folders written by `add`, each a model in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, MemoryModel] = {}
        self.backends: dict[str, Backend] = {"memory": MemoryBackend(self.models)}
        self.metrics = Metrics()
        self.tracer = Tracer(TraceConfig(root / "traces.json"))
        self.repository = Repository(
            self.metrics, LoadQueue(self._backend_of), tracer=self.tracer, max_models=MAX_MODELS
        )

    def _backend_of(self, name: str) -> Backend:
        if name not in self.backends:
            raise LoadError(f"no backend '{name}'")
        return self.backends[name]

    def add(self, name: str, *versions: int, config: str = "") -> MemoryModel:
        for version in versions or (1,):
            (self.root / name / str(version)).mkdir(parents=True)
        (self.root / name / "config.pbtxt").write_text(f'backend: "memory" version_policy {{ all {{ }} }} {config}')
        self.models[name] = MemoryModel(SPEC)
        return self.models[name]

    def trace(self, name: str) -> None:
        """Give a model its own trace settings."""
        self.tracer.update(name, {"trace_rate": ["7"]})

    def is_traced(self, name: str) -> bool:
        """Whether it has them."""
        return self.tracer.settings(name)["trace_rate"] == "7"

    async def load(self) -> Repository:
        await self.repository.load_all(find_models([self.root]))
        return self.repository
