"""What is known about one model: which of its versions serve, load, leave or are gone, and how the index words that.

Lives here: states, and nothing that waits. Must not: load anything, or know what a version is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

V = TypeVar("V")

UNLOADED = "unloaded"
DUPLICATE_NAME = "model appears in two or more repositories"
"""Reasons in the index that Triton's clients compare with."""


_MAX_DIGITS = 100
"""Of a version that is a number: int() raises an error for thousands, and other servers may report anything."""


_LONGEST_REASON = 2_000
"""In characters. The index sends those of all models in one message, and gRPC's clients accept 4 MiB by default."""


class ModelState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


def version_order(version: str) -> tuple[int, str]:
    """Sort key: versions by number; those of other servers that aren't numbers come after them."""
    if version.isascii() and version.isdecimal() and len(version) <= _MAX_DIGITS:
        return int(version), ""
    return 10**_MAX_DIGITS, version


@dataclass(frozen=True, slots=True)
class IndexLine:
    """A line of the repository's index. No `version`: the versions aren't known; no `state`: it was never loaded."""

    name: str
    version: str = ""
    state: ModelState | None = None
    reason: str = ""


@dataclass(slots=True)
class ModelRecord(Generic[V]):
    """One name's state. Versions are in `serving` while they accept requests; then, while they execute what they
    accepted, in `leaving`; afterwards, or if they never served, in `gone` with the reason. `failure` is why the last
    load failed, if it did; `unreachable_reason` is why loaded versions accept no requests for now, if they don't.

    `explicit`: it was asked for by itself, and not loaded because another needs it.

    A change to a model is made in its `turn`, and `operations` counts it from when it starts to wait for that.
    """

    name: str
    serving: dict[str, V] = field(default_factory=dict)
    loading: list[str] | None = None
    leaving: list[str] = field(default_factory=list)
    gone: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    unreachable_reason: str = ""
    unloaded: bool = False
    on_disk: bool = False
    duplicates: bool = False
    operations: int = 0
    explicit: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def state(self) -> ModelState | None:
        """The model's as a whole: READY while any version serves, None if it was never asked for."""
        if self.serving and not self.unreachable_reason:
            return ModelState.READY
        if self.loading is not None:
            return ModelState.LOADING
        if self.failure or self.unreachable_reason:
            return ModelState.UNAVAILABLE
        if self.leaving:
            return ModelState.UNLOADING
        return ModelState.UNAVAILABLE if self.unloaded else None

    @property
    def missing(self) -> bool:
        """Whether the model should serve, and doesn't."""
        if self.unreachable_reason:
            return True
        return self.state is ModelState.LOADING or bool(self.failure and not self.serving)

    @property
    def forgettable(self) -> bool:
        """Whether nothing is lost by forgetting the name."""
        return self.stranger and not self.failure

    @property
    def stranger(self) -> bool:
        """Whether the name is known only from loads or unloads that are over."""
        return not (self.operations or self.serving or self.leaving or self.on_disk)

    def loading_versions(self, versions: list[str]) -> None:
        """The load in progress is of these."""
        if self.loading is not None:
            self.loading = versions

    def end_load(self, versions: dict[str, V]) -> list[V]:
        """The load succeeded: these serve from now on. Returns what served before."""
        before = self._replace(versions)
        self.loading, self.failure, self.unreachable_reason, self.unloaded = None, "", "", False
        return before

    def fail_load(self, reason: str) -> None:
        """The load failed: what served goes on serving. A long reason is cut off."""
        reason = reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + " [...]"
        lost = {*self.gone, *(self.loading or ())} - self.serving.keys()
        self.gone = dict.fromkeys(lost, reason)
        self.loading, self.failure, self.unloaded = None, reason, False

    def unload(self) -> list[V]:
        """Nothing serves any more, as requested. Returns what served."""
        lost, was_asked_for = dict.fromkeys(self.gone, UNLOADED), self.state is not None
        self.unreachable_reason = ""
        before = self._replace({})
        self.gone, self.failure, self.unloaded = lost, "", was_asked_for
        return before

    def drained(self, version: str) -> None:
        """A version that accepted no more requests has answered all of them."""
        self.leaving.remove(version)
        if version not in self.serving and version not in self.leaving:
            self.gone[version] = UNLOADED if self.serving else self.failure or UNLOADED

    def lines(self) -> list[IndexLine]:
        """The index's lines: one per version, by number, or one without a version if none is known."""
        if self.duplicates and not (self.serving or self.leaving or self.loading):
            return [IndexLine(self.name, "", ModelState.UNAVAILABLE, DUPLICATE_NAME)]
        served = ModelState.READY, self.failure and f"the last load failed: {self.failure}"
        if self.unreachable_reason:
            served = ModelState.UNAVAILABLE, self.unreachable_reason
        versions = {
            **{version: (ModelState.UNAVAILABLE, reason) for version, reason in self.gone.items()},
            **dict.fromkeys(self.leaving, (ModelState.UNLOADING, "")),
            **dict.fromkeys(self.loading or (), (ModelState.LOADING, "")),
            **dict.fromkeys(self.serving, served),
        }
        if versions:
            return [IndexLine(self.name, one, *versions[one]) for one in sorted(versions, key=version_order)]
        reason = self.failure or (UNLOADED if self.unloaded else "")
        return [IndexLine(self.name, "", self.state, reason if self.state is ModelState.UNAVAILABLE else "")]

    def _replace(self, versions: dict[str, V]) -> list[V]:
        self.leaving.extend(self.serving)
        self.gone = {}
        before, self.serving = list(self.serving.values()), versions
        return before
