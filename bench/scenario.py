"""What is measured, read from TOML: which server gets which load, what it is compared with, and what it should reach.

Lives here: the format of bench/scenarios/*.toml as values, checked. Must not: start, measure or print. Everything but
`load` and `load_all` is pure. bench/README.md describes the format.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import MODELS

__all__ = [
    "FOLDER",
    "OVER_HTTP",
    "RIVALS",
    "Closed",
    "Open",
    "Point",
    "Reach",
    "Reference",
    "Scenario",
    "ScenarioError",
    "Side",
    "load",
    "load_all",
    "parse",
    "parse_reach",
]

FOLDER = Path(__file__).parent / "scenarios"
OVER_HTTP = ("mosec", "litserve")
RIVALS = ("mlserver", "kserve", "pytriton", "rayserve", *OVER_HTTP)
_IN_PROCESS = ("onnxruntime", "batching")
_SERVERS = ("paceline", "echo", "naive", *_IN_PROCESS, *RIVALS)
_TRANSPORTS = ("unary", "stream", "shm")
_MEASURES = (
    *("requests_per_s", "answered", "p50_ms", "p90_ms", "p99_ms", "server_cpu_us", "rows_per_batch"),
    *("stack_us", "split_us", "stack_split_us", "memcpy_us"),
)


class ScenarioError(Exception):
    """A scenario's text is wrong; says where, and what was expected."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop of `clients` clients: each sends its next request when it has the answer to the last."""

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} client{'s' if self.clients > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Open:
    """An open loop: requests at random, `per_s` a second on average, whether or not answers come."""

    per_s: float

    def __str__(self) -> str:
        return f"{self.per_s:g} a second"


Point = Closed | Open


@dataclass(frozen=True, slots=True)
class Reach:
    """A bound that a ratio is to keep; written ">= 0.9" or "<= 1.3"."""

    at_least: bool
    bound: float

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Side:
    """One that is measured. Requests have the `shapes` in turn, without the batch axis; each is one row.

    `rows` are those of a batch, for sides without a server that makes batches: onnxruntime, batching. `args` are more
    arguments of `paceline serve`; sides that differ in them have servers of their own. `upstream` is the server that
    paceline is a proxy for, if it is one.
    """

    server: str
    model: str
    shapes: tuple[tuple[int, ...], ...]
    transport: str = "unary"
    rows: int = 1
    args: tuple[str, ...] = ()
    upstream: str = ""

    @property
    def served(self) -> bool:
        """Whether there is a server, and so a load on it."""
        return self.server not in _IN_PROCESS

    @property
    def process(self) -> tuple[str, ...]:
        """Sides that have this in common are served by one process."""
        return self.server, self.upstream, *self.args


@dataclass(frozen=True, slots=True)
class Reference:
    """The subject's `measure` is divided by this side's `over`. Without `reach`, the ratio is for information only."""

    side: Side
    label: str
    measure: str
    over: str
    reach: Reach | None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario file."""

    name: str
    title: str
    subject: Side
    points: tuple[Point, ...]
    references: tuple[Reference, ...]
    deadline_s: float
    plot: bool

    @property
    def sides(self) -> tuple[Side, ...]:
        """All that is measured, each once, the subject first."""
        return tuple(dict.fromkeys([self.subject, *(one.side for one in self.references)]))

    def name_of(self, side: Side) -> str:
        """What a report calls `side`."""
        if side == self.subject:
            return side.server
        return next(one.label for one in self.references if one.side == side)


def load_all(folder: Path = FOLDER) -> list[Scenario]:
    """Every scenario of `folder`, by name. Raises ScenarioError as `load` does."""
    return [load(path) for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)]


def load(path: Path) -> Scenario:
    """The scenario in `path`. Raises ScenarioError if it isn't one."""
    try:
        return parse(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ScenarioError) as error:
        raise ScenarioError(f"{path}: {error}") from None


def parse(name: str, text: Mapping[str, Any]) -> Scenario:
    """The scenario in what a file holds. Raises ScenarioError, which names the key that is wrong."""
    top = _Table("", text)
    subject_table = _Table("subject", top.take("subject", dict))
    subject = _side(subject_table, None)
    clients = top.take("clients", (int, list), [])
    rates = top.take("rates", list, [])
    points: list[Point] = [Closed(one) for one in _listed("clients", clients, int)]
    points += [Open(one) for one in _listed("rates", rates, (int, float))]
    references = [
        _reference(_Table(f"reference {place}", one), subject)
        for place, one in enumerate(top.take("reference", list, []), start=1)
    ]
    made = Scenario(
        name=name,
        title=top.take("title", str),
        subject=subject,
        points=tuple(points) or (Closed(1),),
        references=tuple(references),
        deadline_s=float(top.take("deadline_s", (int, float), 5.0)),
        plot=top.take("plot", bool, False),
    )
    subject_table.end()
    top.end()
    if rates and any(one.transport in ("stream", "http") for one in made.sides):
        raise ScenarioError("rates: streams and HTTP are measured with clients only")
    return made


def _side(table: _Table, subject: Side | None) -> Side:
    """The side that a table describes; what the table leaves out is as in the subject."""
    server = table.choice("server", _SERVERS, subject.server if subject else None)
    model = table.choice("model", tuple(MODELS), subject.model if subject else None)
    shapes = table.take("shapes", list, None)
    if shapes is not None:
        shapes = tuple(tuple(_listed("shapes", one, int)) for one in _listed("shapes", shapes, list))
    elif subject is not None and model == subject.model:
        shapes = subject.shapes
    else:
        shapes = (MODELS[model].shape,)
    same = subject is not None and server == subject.server
    args = tuple(_listed("args", table.take("args", list, list(subject.args) if subject and same else []), str))
    if args and server != "paceline":
        raise ScenarioError(f"args: only paceline takes them, not {server}")
    upstreams = ("", "paceline", *(one for one in RIVALS if one not in OVER_HTTP))
    upstream = table.choice("upstream", upstreams, subject.upstream if subject and same else "")
    if upstream and server != "paceline":
        raise ScenarioError(f"upstream: only paceline has one, not {server}")
    transport = "http"
    if server not in OVER_HTTP:
        transport = table.choice("transport", _TRANSPORTS, subject.transport if subject else "unary")
    return Side(
        server=server,
        model=model,
        shapes=shapes,
        transport=transport,
        rows=table.take("rows", int, subject.rows if subject else 1),
        args=args,
        upstream=upstream,
    )


def _reference(table: _Table, subject: Side) -> Reference:
    side = _side(table, subject)
    measure = table.choice("measure", _MEASURES, "requests_per_s")
    over = table.choice("over", _MEASURES, measure)
    reach = table.take("reach", str, "")
    label = table.take("label", str, side.server)
    table.end()
    if over != measure:  # two numbers of one measurement
        side = subject
    return Reference(side, label, measure, over, parse_reach(reach) if reach else None)


def parse_reach(text: str) -> Reach:
    """A bound as scenarios write it. Raises ScenarioError if it isn't one."""
    operator, _, bound = text.partition(" ")
    try:
        return Reach({">=": True, "<=": False}[operator], float(bound))
    except (KeyError, ValueError):
        raise ScenarioError(f'reach: expected ">= NUMBER" or "<= NUMBER", got "{text}"') from None


def _listed(key: str, value: Any, kind: type | tuple[type, ...]) -> Sequence[Any]:
    """One value or several, each positive if it is a number."""
    values = value if isinstance(value, list) else [value]
    for one in values:
        if not isinstance(one, kind) or isinstance(one, bool) or (isinstance(one, (int, float)) and one <= 0):
            raise ScenarioError(f"{key}: got {one!r}")
    return values


_MISSING: Any = object()


class _Table:
    """A table whose keys are taken one by one, so that `end` can tell which are left."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where = f"{where}: " if where else ""
        self._values = dict(values)

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        value = self._values.pop(key, default)
        if value is _MISSING:
            raise ScenarioError(f"{self._where}'{key}' is missing")
        if value is not default and not isinstance(value, kind):
            raise ScenarioError(f"{self._where}{key}: got {value!r}")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None) -> str:
        value: str = self.take(key, str, default if default is not None else _MISSING)
        if value not in choices:
            raise ScenarioError(f"{self._where}{key}: expected one of {', '.join(choices)}, got '{value}'")
        return value

    def end(self) -> None:
        if self._values:
            raise ScenarioError(f"{self._where}unknown: {', '.join(sorted(self._values))}")
