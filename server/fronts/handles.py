"""The engine's side of the catalogue: models by the handles that fronts use for them.

Lives here: giving handles, and making the snapshot. Must not: send it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

from paceline.server.codec.open_codec import OpenCodec
from paceline.server.fronts.catalogue import Catalogue, VersionInfo
from paceline.server.models.repository import ServedModel

__all__ = ["Handles"]


class Handles:
    """The engine's side: models by handle."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._handles: dict[ServedModel, int] = {}
        self._models: dict[int, ServedModel] = {}

    # hot path
    def model(self, handle: int) -> ServedModel | None:
        """The model, if it still serves."""
        return self._models.get(handle)

    def update(self, served: Mapping[tuple[str, str], ServedModel]) -> Catalogue:
        """Give handles to new models, forget those that are gone, and make the snapshot."""
        # Fronts know nothing about models that don't declare their tensors: they pass requests for them on unchanged.
        shown = {name: model for name, model in served.items() if not isinstance(model.codec, OpenCodec)}
        models: Iterable[ServedModel] = dict.fromkeys(shown.values())
        self._handles = {model: self._handles.get(model) or next(self._numbers) for model in models}
        self._models = {handle: model for model, handle in self._handles.items()}
        cards = tuple(_card(model, handle) for model, handle in self._handles.items())
        return Catalogue(cards, {name: self._handles[model] for name, model in shown.items()})


def _card(model: ServedModel, handle: int) -> VersionInfo:
    return VersionInfo(
        handle, model.name, model.version, model.spec, model.max_request_rows, model.batch_id_prefix, model.remote
    )
