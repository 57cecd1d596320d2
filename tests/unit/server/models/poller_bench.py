"""A repository on disk whose models are in memory, polled when a test asks for it.

Lives here: what the tests of the poller start from. Must not: assertions about behaviour.
"""

from __future__ import annotations

from pathlib import Path

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.server.models.layout import Layout
from paceline.server.models.load_queue import LoadQueue
from paceline.server.models.model_record import ModelState
from paceline.server.models.poller import Poller
from paceline.server.models.repository import Repository
from paceline.server.telemetry.metrics import Metrics
from tests.memory_models import MemoryBackend, MemoryModel

__all__ = ["CONFIG", "SPEC", "WARMED", "Bench"]

SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))
CONFIG = 'backend: "memory"'
WARMED = f'{CONFIG} max_batch_size: 1 input {{ name: "a" data_type: TYPE_FP32 dims: 1 }}'
"""The model is warmed up, which a closed gate holds up: a load that takes long."""


class Bench:
    """A repository on disk, polled when the test asks for it. Every model is in memory."""

    def __init__(self, root: Path, max_models: int = 9) -> None:
        self.root = root
        self.models: dict[str, MemoryModel] = {}
        backend = MemoryBackend(self.models)
        self.repository = Repository(Metrics(), LoadQueue(lambda name: backend), max_models=max_models)
        self.layout = Layout([root])
        self.poller = Poller(self.layout, self.repository, interval_s=1e6)

    def write(self, name: str, config: str = CONFIG, version: int = 1) -> Path:
        (self.root / name / str(version)).mkdir(parents=True, exist_ok=True)
        (self.root / name / "config.pbtxt").write_text(config)
        self.models[name] = MemoryModel(SPEC)
        return self.root / name

    async def start(self) -> None:
        self.layout.open(may_be_empty=True)
        await self.poller.start()

    async def settle(self) -> None:
        """Poll until nothing changes any more: once if nothing did, else twice."""
        while await self.look():
            pass

    async def look(self) -> bool:
        """Poll once, and wait for what that begins."""
        unsettled = await self.poller.poll_once()
        await self.poller.ended()
        return unsettled

    @property
    def ready(self) -> dict[str, list[str]]:
        """The versions that serve, by name."""
        found: dict[str, list[str]] = {}
        for line in self.repository.index():
            if line.state is ModelState.READY:
                found.setdefault(line.name, []).append(line.version)
        return found

    @property
    def load_ids(self) -> list[str]:
        """For each model that serves, a text that differs for each load."""
        return [model.batch_id_prefix for model in self.repository.models]
