"""The load that a server has, from what it says of a model.

Lives here: looking twice. Must not: anything that a server could notice.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from paceline.clients.load.control import ControlClient, Served
from paceline.clients.options import ConnectionOptions
from paceline.server.tune.measuring import TuneError

__all__ = ["Observed", "observed"]

_BETWEEN_S = 5.0


class Observed(NamedTuple):
    """Requests a second, and rows of each, about."""

    per_s: float
    rows: int


def observed(server: str, access: ConnectionOptions, model: str, between_s: float = _BETWEEN_S) -> Observed:
    """What came to `model` on a server for so long; blocks. Raises TuneError if that was nothing, or the server doesn't
    say, and ClientError."""
    with ControlClient(server, tls=access.tls or False, token=access.token) as client:
        client.model_metadata(model)  # raises what is wrong, which looks at statistics don't tell
        before, began = client.statistics(model, ""), time.monotonic()
        time.sleep(between_s)
        served = Served.between(before, client.statistics(model, ""))
        seconds = time.monotonic() - began
    if served is None:
        raise TuneError(f"{server} tells no statistics of a model '{model}'")
    if not served.succeeded:
        raise TuneError(f"{server} answered no request for '{model}' in {seconds:.3g} s: give --rate")
    return Observed((served.succeeded + served.failed) / seconds, max(1, round(served.rows / served.succeeded)))
