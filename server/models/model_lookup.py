"""What is known of all models, and which of them requests find.

Lives here: look-ups, readiness, and the one step in which all look-ups change. Must not: load, wait, or know RPCs; what
changes a model is `server.models.repository`. Everything runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.server.errors import InvalidRequest, ModelNotFound, ModelNotReady, ServerError
from paceline.server.models.model_record import UNLOADED, IndexLine, ModelRecord, ModelState
from paceline.server.models.served_model import ServedModel

_UNKNOWN = "Request for unknown model"
"""What Triton's clients look for, whatever is wrong with the model."""
_MAX_LISTED = 5


class ModelLookup:
    """Finds models. `strict_readiness`: whether it is ready only if every model that should serve is. `on_change` is
    called whenever `ready` may have changed."""

    def __init__(self, *, strict_readiness: bool = True) -> None:
        self._strict_readiness = strict_readiness
        self.on_change: Callable[[], None] = lambda: None
        self.waits_for = ""
        """Why this server isn't ready whatever its models say; "" if nothing is in the way. Code that changes it calls
        `on_change`."""
        self.names_known = True
        """Whether an unknown name is certainly no model's. If not, `waits_for` says why."""
        self._records: dict[str, ModelRecord[ServedModel]] = {}
        self.served: dict[tuple[str, str], ServedModel] = {}
        """What requests find, by name and version as requests may write them; the version "" is the latest."""

    @property
    def ready(self) -> bool:
        """Whether every model that should serve does and has an instance that can execute; True if not required."""
        if not self._strict_readiness:
            return True
        missing = self.waits_for or any(record.missing for record in self._records.values())
        return not missing and all(model.instances.can_execute for model in self.models)

    @property
    def why_not_ready(self) -> str:
        """What keeps it from being ready, in words; "" if nothing does. Reasons that concern all models come first."""
        if self.ready:
            return ""
        if self.waits_for:
            return self.waits_for
        if failed := ", ".join(f"'{name}'" for name in self.failures):
            return f"models failed to load: {failed}"
        unable = ", ".join(f"'{model.name}'" for model in self.models if not model.instances.can_execute)
        return f"models have no instance left: {unable}" if unable else "models are loading"

    @property
    def why_not_live(self) -> str:
        """Why the process should be restarted: a model has lost its devices, and can't get them back in this one."""
        return "; ".join(
            f"model '{model.name}': {model.instances.unrecoverable_reason}"
            for model in self.models
            if model.instances.unrecoverable_reason
        )

    @property
    def failures(self) -> dict[str, str]:
        """Why models that should serve don't, by name."""
        return {name: record.failure for name, record in self._records.items() if record.failure and record.missing}

    @property
    def models(self) -> list[ServedModel]:
        """All versions being served."""
        return [model for record in self._records.values() for model in record.serving.values()]

    @property
    def places(self) -> int:
        """The number of models that serve or are being loaded, regardless of versions."""
        return sum(bool(record.serving) or record.loading is not None for record in self._records.values())

    # hot path
    def get(self, name: str, version: str) -> ServedModel:
        """What serves `version` of model `name`; the latest for "" or "-1". Raises ModelNotFound, ModelNotReady, or
        InvalidRequest for a version that is no number."""
        model = self.served.get((name, version))
        if model is None:
            raise self._why_not(name, version)
        return model

    def find(self, name: str, version: str) -> ServedModel | None:
        """What `get` would give, or None."""
        return self.served.get((name, version))

    def is_ready(self, name: str, version: str) -> bool:
        """Whether `get` would find it, and it can execute. Raises ModelNotFound for a name that is unknown, once all
        names are known, and for an unknown version of a model that serves; or InvalidRequest."""
        try:
            return self.get(name, version).instances.can_execute
        except ModelNotReady:
            return False
        except ModelNotFound:
            if name in self._records and not self._records[name].serving:
                return False
            raise

    def versions(self, name: str) -> list[str]:
        """The versions of a model being served, oldest first."""
        return list(self._records[name].serving)

    def index(self) -> list[IndexLine]:
        """A line for every version of every model known, by name and version."""
        return [line for name in sorted(self._records) for line in self._records[name].lines()]

    def _serve(self, name: str, models: Sequence[ServedModel], before: Sequence[ServedModel]) -> None:
        """Change what requests find, in one step. `models` are in ascending order. Requests that have arrived still go
        to the old ones."""
        for model in before:
            model.batcher.take_announced()
            for successor in models:
                successor.replaces(model)
        for version in ("", "-1", *(model.version for model in before)):
            self.served.pop((name, version), None)
        for model in models:
            self.served[name, model.version] = self.served[name, ""] = self.served[name, "-1"] = model

    def _why_not(self, name: str, version: str) -> ServerError:
        record = self._records.get(name)
        if record is None and not self.names_known:
            return ModelNotReady(f"{_UNKNOWN}: '{name}' is not ready: {self.waits_for}")
        if record is None:
            known = sorted(known for known, one in self._records.items() if one.serving or one.missing)
            more = f" and {len(known) - _MAX_LISTED} more" if len(known) > _MAX_LISTED else ""
            return ModelNotFound(f"{_UNKNOWN}: '{name}' is not found; this server has {known[:_MAX_LISTED]}{more}")
        if record.missing:
            reason = record.unreachable_reason or record.failure or ModelState.LOADING.value
            return ModelNotReady(f"{_UNKNOWN}: '{name}' is not ready: {reason}")
        if not record.serving:
            why = UNLOADED if record.unloaded else "never loaded"
            return ModelNotFound(f"{_UNKNOWN}: '{name}' has no available versions: it was {why}")
        if not (version.isascii() and version.isdecimal()):
            return InvalidRequest(f"model '{name}': expected a version number, got '{version}'")
        reason = "LOADING" if version in (record.loading or ()) else record.gone.get(version, UNLOADED)
        if reason != UNLOADED:
            return ModelNotReady(f"{_UNKNOWN}: '{name}' version {version} is not at ready state: {reason}")
        versions = list(record.serving)
        return ModelNotFound(f"{_UNKNOWN}: '{name}' version {version} is not found; versions served: {versions}")
