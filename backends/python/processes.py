"""The processes of one model that aren't an instance's yet.

Lives here: which of them are being loaded. Must not: know what is loaded in them, or instances.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.backends.base import Device, ModelSource
from paceline.backends.python.process import ModelProcess

__all__ = ["Processes"]


class Processes:
    """`first` has loaded the model already, and is the first one to be taken on its device. `load` loads the model in
    another one; it blocks, and if it raises LoadError, that process has ended."""

    def __init__(self, source: ModelSource, first: ModelProcess, load: Callable[[ModelProcess], None]) -> None:
        self._source = source
        self._first: ModelProcess | None = first
        self._load = load
        self._lock = threading.Lock()
        self._loading: set[ModelProcess] = set()
        self._is_abandoned = False

    @property
    def first(self) -> ModelProcess:
        """The first process, until it is taken."""
        assert self._first is not None
        return self._first

    def take(self, device: Device) -> ModelProcess:
        """A process that has the model loaded, now the caller's. Blocks; raises LoadError."""
        first = self._first
        if first is not None and first.device == device:
            self._first = None
            if not first.ended:
                return first
        process = ModelProcess(self._source, device)
        with self._lock:
            self._loading.add(process)
            if self._is_abandoned:
                process.kill()
        try:
            self._load(process)
        finally:
            with self._lock:
                self._loading.discard(process)
        return process

    def abandon(self) -> None:
        """End the processes that are loading now, whatever they do: whoever waits for them gets a LoadError, and
        later loads fail too. On any thread."""
        with self._lock:
            self._is_abandoned = True
            for process in self._loading:
                process.kill()

    def close(self) -> None:
        """Close the first process, if nobody has taken it. Blocks."""
        first, self._first = self._first, None
        if first is not None:
            first.close()
