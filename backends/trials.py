"""What may be asked of a model before it serves: whether its rows can be stacked, and filled up.

Lives here: the questions, and what running the model showed. Must not: how a runtime finds that out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from paceline.backends.spec import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """What running a model showed. `spec`: what the model declares, with output dims as observed. `why_not`: why rows
    can't be stacked, or why that couldn't be determined; "" if nothing speaks against it. `deadly`: the trial ended the
    process that it ran in. `fixed_rows`: how many rows the model always takes, if they don't depend on each
    other, so that it can be served by rows all the same; else 0."""

    spec: ModelSpec
    why_not: str = ""
    deadly: bool = False
    fixed_rows: int = 0


@dataclass(frozen=True, slots=True)
class LengthAxis:
    """An axis of an input, of which 0 is the batch's, along which requests are to be filled up with `fill`."""

    input: str
    axis: int
    fill: int | float = 0


@dataclass(frozen=True, slots=True)
class LengthTrial:
    """What filling up requests showed. `spec` is the one that was tried, with the `lengths` that are to be used, and
    their inputs' `fill`. `why_not`: why it has none although the model may have a mask, or, where they were asked for,
    what differs from requests alone; "" if nothing speaks against it."""

    spec: ModelSpec
    why_not: str = ""


class Supervise(Protocol):
    """Runs one execution of a model that is being loaded. May raise errors that aren't a backend's."""

    def __call__(self, function: Callable[[], T], /) -> T: ...


def unsupervised(function: Callable[[], T], /) -> T:
    """The `Supervise` that only calls `function`."""
    return function()


@runtime_checkable
class Triable(Protocol):
    """A model whose declarations can be checked before anybody relies on them."""

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        """Run it with made-up inputs, before any instance is made. Blocks for executions, each run by `supervise`."""


@runtime_checkable
class TriesLengths(Protocol):
    """A model that can be asked along which axes requests of different sizes may be filled up."""

    def try_lengths(
        self, spec: ModelSpec, asked: Sequence[LengthAxis] | None, supervise: Supervise = unsupervised
    ) -> LengthTrial:
        """Run rows of different sizes, alone and filled up together, before any instance is made. `spec` is batched and
        as it will be served. `asked`: the axes that a configuration names; None: find out, of a model that has a mask.
        Blocks for some executions, each run by `supervise`. Raises LoadError for axes that can't be filled up, naming
        the input, what was expected and what was asked for."""
