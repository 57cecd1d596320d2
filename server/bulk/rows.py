"""A chunk's rows as a model takes them.

Lives here: which rows are good, how large they are, and how some of them become the inputs of one call. Must not: know
Arrow's types (`decoding.py`), or choose which rows share a call (`batches.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.server.bulk.values import BadRow, Places

__all__ = ["Rows", "Sizes"]

Sizes = tuple[int, ...]
"""One for each length of the model, in their order."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`good` are the places in the chunk of rows that the model can be given, ascending; all others are in `bad`.
    Unless `batched`, the model has no batch axis, and a call is of one row. `lengths`: what `take` may fill up."""

    inputs: Mapping[str, Array]
    good: Places
    bad: Sequence[BadRow]
    batched: bool
    lengths: Lengths | None = None

    def common_sizes(self, places: Places) -> Sizes:
        """The sizes that the rows at `places` are filled up to if they share a call; () for a model without lengths."""
        return ()

    def take(self, places: Places, sizes: Sizes) -> dict[str, Array]:
        """The inputs of one call, by name: the rows at `places`, in that order, filled up to `sizes`, which
        `common_sizes` of these or more places returned. With rows in front if the model has a batch axis. May be views
        of the chunk, which are read-only. `places` are of `good`, and have one shape, but for what is filled up."""
        if not self.batched:
            return {name: values[places[0]] for name, values in self.inputs.items()}
        first, last = int(places[0]), int(places[-1])
        consecutive = last - first == len(places) - 1 and bool(np.all(places[1:] > places[:-1]))
        chosen: slice | Places = slice(first, last + 1) if consecutive else places
        return {name: values[chosen] for name, values in self.inputs.items()}
