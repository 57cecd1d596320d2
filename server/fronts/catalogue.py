"""What fronts know about the models that the engine serves.

Lives here: the snapshot that is sent, and a front's look-up. Must not: decide what a name means or why it means
nothing; the engine does that. A front's look-up may be out of date: handles are never used twice, and the engine
answers STALE to a request for one that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.backends.spec import ModelSpec
from paceline.server.codec.adapting_codec import codec_for
from paceline.server.codec.codec import ModelCodec

__all__ = ["Catalogue", "LookUp", "Model", "VersionInfo"]


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a model, with what its codec needs to know."""

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


@dataclass(slots=True)
class Model:
    """What a front needs to accept a request for a model; if it is `remote`, another server executes it.
    `answers_large` once an answer was: from then on the front makes them itself."""

    handle: int
    codec: ModelCodec
    batch_id_prefix: str
    remote: bool
    answers_large: bool = False


class LookUp:
    """The front's side: models by name and version, according to the latest catalogue."""

    def __init__(self) -> None:
        self._models: dict[int, Model] = {}
        self._names: dict[tuple[str, str], Model] = {}

    def update(self, catalogue: Catalogue) -> None:
        self._models = {card.handle: self._models.get(card.handle) or _model(card) for card in catalogue.cards}
        self._names = {name: self._models[handle] for name, handle in catalogue.names.items()}

    # hot path
    def find(self, name: str, version: str) -> Model | None:
        return self._names.get((name, version))


def _model(card: VersionInfo) -> Model:
    codec = codec_for(card.name, card.version, card.spec, card.max_request_rows)
    return Model(card.handle, codec, card.batch_id_prefix, card.remote)
