"""The shared memory regions of clients, by name.

Lives here: what a region is to everybody else, and the registry. Must not: how memory is opened, read and written
(`system_region`, `cuda_region`), tensors, messages. The registry is used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from paceline.backends.spec import Array
from paceline.server.bounded_cache import BoundedCache
from paceline.server.errors import InvalidRequest, RegionExists, RegionNotFound, TooManyRegions
from paceline.server.limits import LARGEST_MESSAGE_BYTES, Limits

_MAX_LISTED = 5
_MAX_NAME_BYTES = 1_024
"""So that a message of 4 MiB, the most that gRPC's clients take, can list as many regions as are allowed by default."""
_SHOWN = 64

T = TypeVar("T")


class Region:
    """Memory of a client that requests read from and write to. Whoever holds the region may use it; it is given back
    when nobody does. All methods may be called on any thread, and raise InvalidRequest if the client has taken the
    memory away, GpuLost if its GPU is lost. `mapped_at` is its address, for `copy_all` only, since the memory may be
    gone; None if it has none."""

    kind: str
    """`system` or `cuda`."""
    name: str
    byte_size: int

    @property
    def mapped_at(self) -> int | None:
        return None

    def check(self) -> None:
        """Check that the memory is still there."""

    def address_on(self, gpu: int) -> int | None:
        """Its address, if it is that GPU's memory; else None."""
        return None

    def read_into(self, target: Array, offset: int) -> None:
        """Fill `target`, which is C-contiguous, from `offset`. Blocks for the copy. Some of `target` may be filled if
        it raises."""
        raise NotImplementedError

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put `data` at `offset`. Blocks for the copy."""
        raise NotImplementedError


# hot path for requests that use some
def all_intact(regions: Iterable[Region]) -> bool:
    """Whether all of them are still there: clients may truncate their memory."""
    try:
        for region in regions:
            region.check()
    except InvalidRequest:
        return False
    return True


class Regions:
    """At most `limit` regions, system and CUDA ones in one namespace; `refused` counts registrations beyond that. An
    input that has to be read when its request arrives, while all other requests wait, has at most `message_bytes`, and
    `text_elements` if it is of texts, as if it came in the message.

    A region that is unregistered while requests use it can be found until the last of them has ended, as in Triton.
    """

    def __init__(
        self, limit: int, message_bytes: int = LARGEST_MESSAGE_BYTES, text_elements: int = Limits().request_elements
    ) -> None:
        self._limit = limit
        self.message_bytes = message_bytes
        self.text_elements = text_elements
        self.refused = 0
        self._registered: dict[str, Region] = {}
        self._leaving: WeakValueDictionary[str, Region] = WeakValueDictionary()
        self._known = BoundedCache[object, Any]()  # results of any kind, see `known`

    @property
    def registered(self) -> int:
        """How many there are."""
        return len(self._registered)

    def refuse_unless_free(self, name: str) -> None:
        """Raise InvalidRequest for an empty name, which means all regions in other RPCs, and for one that is too long
        to be listed with all the others; RegionExists for one that is taken; TooManyRegions at the limit."""
        if not name:
            raise InvalidRequest("failed to register shared memory region '': invalid args: expected a name")
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise InvalidRequest(
                f"failed to register shared memory region '{name[:_SHOWN]}…': invalid args: expected a name of at most "
                f"{_MAX_NAME_BYTES} bytes, got {len(name.encode())}"
            )
        if name in self._registered:
            raise RegionExists(f"shared memory region '{name}' already in manager: unregister it before")
        if len(self._registered) >= self._limit:
            self.refused += 1
            raise TooManyRegions(
                f"failed to register shared memory region '{name}': there are {self._limit} regions already, "
                "as many as --max-client-shm-regions allows"
            )

    def add(self, region: Region) -> None:
        """Register. Raises as `refuse_unless_free`."""
        self.refuse_unless_free(region.name)
        self._known.clear()
        self._leaving.pop(region.name, None)
        self._registered[region.name] = region

    # hot path for requests that use one
    def get(self, name: str) -> Region | None:
        """The region `name`; None if there is none."""
        return self._registered.get(name) or self._leaving.get(name)

    def find(self, name: str, kind: str = "") -> Region:
        """The same. Raises RegionNotFound, also if it is of another `kind` than that, if one is given."""
        region = self.get(name)
        if region is None:
            names = sorted(self._registered)
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            unable = f"Unable to find {kind} shared memory region" if kind else "Unable to find shared memory region"
            raise RegionNotFound(f"{unable}: '{name}'; registered are {names[:_MAX_LISTED]}{more}")
        if kind not in ("", region.kind):
            raise RegionNotFound(
                f"expected the name of a {kind} shared memory region, got '{region.name}', which is a {region.kind} one"
            )
        return region

    # hot path for requests that use some
    def known(self, about: object, find: Callable[[Regions], T | None]) -> T | None:
        """What `find` returns for these regions, remembered for `about` as long as the regions stay the same. It may
        hold regions: only the registry keeps it, and no longer than they are registered."""
        found: T | None = self._known.get(about)
        if found is None:
            found = find(self)
            # A region that is leaving may be part of it, and nothing would tell when that one has gone.
            if found is not None and not self._leaving:
                self._known.remember(about, found)
        return found

    def remove(self, kind: str, name: str) -> None:
        """Unregister the region `name`, or all of `kind` if it is "". An unknown name is fine too. Raises
        RegionNotFound if the region is of another kind."""
        self._known.clear()
        for one in [name] if name else [*self._registered]:
            if one in self._registered and (name or self._registered[one].kind == kind):
                self._leaving[one] = self.find(one, kind)
                del self._registered[one]

    def clear(self) -> None:
        """Unregister all."""
        self._known.clear()
        self._registered.clear()

    def of_kind(self, kind: str, name: str = "") -> list[Region]:
        """All regions of `kind`, including those that are leaving, or the one called `name`. Raises RegionNotFound."""
        if name:
            return [self.find(name, kind)]
        return [one for one in ({**self._leaving, **self._registered}).values() if one.kind == kind]
