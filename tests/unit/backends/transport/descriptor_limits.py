"""Opens ends for two processes with 0 to 11 descriptors to spare, then with too low a limit for their memory. Prints
the outcomes as JSON: for each an error, or none, and how many descriptors were left open. A program, as no other
threads may open or close any meanwhile."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.link import Link
from tests.rlimits import limited

SIZE = 1 << 16
MOST = 12


def descriptors() -> set[int]:
    return {number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")}


@contextmanager
def spare_descriptors(count: int) -> Iterator[None]:
    """`count` more descriptors may be opened."""
    highest = max(descriptors())
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < highest:  # the limit is one of their numbers, so the gaps are filled
            held.append(os.open(os.devnull, os.O_RDONLY))
        with limited(resource.RLIMIT_NOFILE, held[-1] + 1 + count):
            yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def outcome(pair: Callable[[int], Any]) -> str | None:
    try:
        here, remote = pair(SIZE)
    except OSError as error:
        return error.strerror
    here.close()
    remote.close()
    return None


def main() -> None:
    found = {}
    for name, pair in (("blocking_link", BlockingLink.pair), ("link", Link.pair)):
        found[name] = []
        for count in range(MOST):
            before = descriptors()
            with spare_descriptors(count):
                error = outcome(pair)
            found[name].append((error, len(descriptors() - before)))
        before = descriptors()
        with limited(resource.RLIMIT_FSIZE, SIZE - 1):
            error = outcome(pair)
        found[name].append((error, len(descriptors() - before)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
