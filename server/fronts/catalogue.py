"""What fronts know about the models that the engine serves.

Lives here: the handles that the engine gives to models, the snapshot that is sent, and a front's look-up. Must not:
decide what a name means or why it means nothing; the repository does that. A front's look-up may be out of date:
handles are never used twice, and the engine answers STALE to a request for one that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from paceline.backends.spec import ModelSpec
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.open_codec import OpenCodec

if TYPE_CHECKING:  # fronts do without it
    from paceline.server.models.served_model import ServedModel

__all__ = ["Catalogue", "Handles", "LookUp", "Model", "VersionInfo"]


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a model, with what its codec needs to know; if it is `remote`, another server executes it."""

    handle: int
    name: str
    version: str
    spec: ModelSpec
    max_request_rows: int
    batch_id_prefix: str
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All that is served, and the handle for each name and version that a request may have."""

    cards: tuple[VersionInfo, ...]
    names: Mapping[tuple[str, str], int]


class Handles:
    """The engine's side: models by handle."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._handles: dict[ServedModel, int] = {}
        self.models: dict[int, ServedModel] = {}
        """Those that still serve."""

    def update(self, served: Mapping[tuple[str, str], ServedModel]) -> Catalogue:
        """Give handles to new models, forget those that are gone, and make the snapshot."""
        # Fronts know nothing about models that don't declare their tensors, about those with sequences, whose steps
        # mustn't overtake each other, and about those whose answers are kept, as all of a request says whether two are
        # equal: they pass requests for them on unchanged.
        shown = {
            name: model
            for name, model in served.items()
            if not isinstance(model.codec, OpenCodec)
            and model.spec.sequence is None
            and model.open_requests is None
            and model.responses is None
        }
        models = dict.fromkeys(shown.values())
        self._handles = {model: self._handles.get(model) or next(self._numbers) for model in models}
        self.models = {handle: model for model, handle in self._handles.items()}
        cards = tuple(
            VersionInfo(handle, one.name, one.version, one.spec, one.max_request_rows, one.batch_id_prefix, one.remote)
            for one, handle in self._handles.items()
        )
        return Catalogue(cards, {name: self._handles[model] for name, model in shown.items()})


@dataclass(slots=True)
class Model:
    """What a front needs to accept a request for a model. `answers_large` once an answer was: from then on the front
    makes them itself."""

    info: VersionInfo
    codec: ModelCodec
    answers_large: bool = False


class LookUp:
    """The front's side: `models` by name and version, according to the latest catalogue."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], Model] = {}

    def update(self, catalogue: Catalogue) -> None:
        before = {model.info.handle: model for model in self.models.values()}
        by_handle = {
            card.handle: before.get(card.handle)
            or Model(card, codec_for(card.name, card.version, card.spec, card.max_request_rows))
            for card in catalogue.cards
        }
        self.models = {name: by_handle[handle] for name, handle in catalogue.names.items()}
