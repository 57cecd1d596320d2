"""What a server has done lately as one page for people, with small plots and without anything from elsewhere.

Lives here: what the page shows, pure. Must not: drawing (plots.py), what metrics mean (snapshots.py), asking servers or
clocks. All text that comes from a server or a user is escaped. No scripts: a page that renews itself is reloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from paceline.clients.options import printable
from paceline.clients.plots import document, sparkline
from paceline.clients.snapshots import Activity, Interval, Version
from paceline.clients.top_table import NONE, rate_text, summary, time_text

_PLOTTED: Final = 30
"""Models with plots; of hundreds, a page would have megabytes."""
_STYLE: Final = """
body { margin: 1.5rem auto; max-width: 72rem; }
h1 { margin: 0; font-size: 1.4rem; }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
h1, h2 { overflow-wrap: anywhere; }
small, .dim, caption, figcaption { color: var(--dim); font-size: 13px; font-weight: normal; }
.bad { color: var(--line1); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .5rem 0; }
th, td { padding: .3rem 0 .3rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { color: var(--dim); font-size: 13px; font-weight: normal; vertical-align: bottom; white-space: normal; }
th:first-child { padding-left: 0; text-align: left; }
a { color: inherit; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .75rem; }
figure { display: flex; flex-direction: column; margin: 0; padding: .4rem .6rem; border: 1px solid var(--rule);
  border-radius: 6px; }
figcaption, figure p { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 .3rem; }
figure p { flex-grow: 1; margin: 0 0 .2rem; font-size: 12.5px; font-weight: 600; font-variant-numeric: tabular-nums; }
figure span { white-space: nowrap; }
figure p small { font-size: 12px; }
.key { width: .6rem; height: .6rem; margin-right: .2rem; stroke-width: 10; }
"""


def _count_text(count: float | None) -> str:
    return NONE if count is None else f"{count:.0f}"


def _mean_text(mean: float | None) -> str:
    return NONE if mean is None else f"{mean:.1f}"


def _share_text(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"


@dataclass(frozen=True, slots=True)
class _Plot:
    """Lines over time. `read` gives the values at one time by the names of their lines, none where a model has nothing
    of the kind. A line has `absent` where it has no value; `high` is the top if that is always the same."""

    title: str
    read: Callable[[Activity], Mapping[str, float | None]]
    text: Callable[[float | None], str]
    absent: float | None = None
    high: float | None = None


def _percentiles(pair: tuple[float, float] | None) -> Mapping[str, float | None]:
    return dict(zip(("p50", "p99"), pair or (None, None), strict=True))


def _of_generations(one: Activity, values: Mapping[str, float | None]) -> Mapping[str, float | None]:
    return {} if one.running is None else values


_PLOTS: Final = (
    _Plot("Requests/s", lambda one: {"": one.requests_per_s}, rate_text),
    _Plot("Failures/s", lambda one: one.failures_per_s or {"": one.failed_per_s}, rate_text, absent=0.0),
    _Plot("Rows/batch", lambda one: {"": one.rows_per_batch}, _mean_text),
    _Plot("Waiting", lambda one: {"": one.waiting}, _count_text),
    _Plot("Queue wait", lambda one: _percentiles(one.queue_us), time_text),
    _Plot("Latency", lambda one: _percentiles(one.latency_us), time_text),
    _Plot("Instances busy", lambda one: {} if one.busy_share is None else {"": one.busy_share}, _share_text, high=1.0),
    _Plot("Sequences", lambda one: one.sequences, _count_text),
    _Plot("Running", lambda one: _of_generations(one, {"": one.running}), _count_text),
    _Plot("Tokens/s", lambda one: _of_generations(one, {"": one.tokens_per_s}), rate_text),
    _Plot("First token after", lambda one: _of_generations(one, _percentiles(one.first_token_us)), time_text),
    _Plot("Key-value cache", lambda one: _of_generations(one, {"": one.cache_share}), _share_text, high=1.0),
)  # fmt: skip


def status_page(intervals: Sequence[Interval], title: str, at: str, refresh_s: int | None = None) -> str:
    """The whole page, of consecutive `intervals`; the last one's numbers are in a table. `at` says when that ended. A
    browser renews the page after `refresh_s`."""
    parts = _whole(intervals, at) if intervals else [f"<p>{escape(at)}: there are no numbers yet.</p>"]
    return document(title, parts, _STYLE, refresh_s)


def _whole(intervals: Sequence[Interval], at: str) -> list[str]:
    now, began_s = intervals[-1], intervals[0].taken_s - (intervals[0].seconds or 0.0)
    failed = f", {now.failed_models:.0f} models failed to load" if now.failed_models else ""
    state = "dim" if now.ready and not failed else "bad"
    parts = [
        f'<p class="{state}">{escape(summary(now) + failed)}</p>',
        f'<p class="dim">{escape(at)}. Numbers are of the last {_span(now.seconds or 0.0)}, plots go back '
        f"{_span(now.taken_s - began_s)}.</p>",
    ]
    if not now.models:
        return [*parts, "<p>No models.</p>"]
    # In an order that stays from one page to the next.
    versions = sorted(now.models, key=lambda key: (key[0], key[1].zfill(10)))
    busiest = frozenset([*now.models][:_PLOTTED])
    ids = {key: f"m{number}" for number, key in enumerate(versions) if key in busiest}
    parts.append(_table(now, versions, ids))
    if len(versions) > len(ids):
        parts.append(f'<p class="dim">Plots are shown of the {len(ids)} busiest models only.</p>')
    for key, id in ids.items():
        plots = "\n".join(_figure(plot, key, intervals, began_s) for plot in _PLOTS)
        name, version = (escape(printable(text)) for text in key)
        parts.append(
            f'<section id="{id}">\n<h2>{name} <small>version {version}</small></h2>\n'
            f'<div class="plots">\n{plots}\n</div>\n</section>'
        )
    return parts


def _table(now: Interval, versions: Sequence[Version], ids: Mapping[Version, str]) -> str:
    columns: dict[str, Callable[[Activity], str]] = {
        "Requests/s": lambda one: rate_text(one.requests_per_s),
        "Failures/s": lambda one: rate_text(one.failed_per_s),
        "Rows/batch": lambda one: _mean_text(one.rows_per_batch),
        "Waiting": lambda one: _count_text(one.waiting),
        "Queue p99": lambda one: time_text(one.queue_us and one.queue_us[1]),
        "Latency p50": lambda one: time_text(one.latency_us and one.latency_us[0]),
        "Latency p99": lambda one: time_text(one.latency_us and one.latency_us[1]),
        "Instances busy": lambda one: _share_text(one.busy_share),
    }
    if any(one.running is not None for one in now.models.values()):
        columns["Tokens/s"] = lambda one: rate_text(one.tokens_per_s)
        columns["First token p99"] = lambda one: time_text(one.first_token_us and one.first_token_us[1])
    rows = []
    for key in versions:
        name, version = (escape(printable(text)) for text in key)
        activity = now.models[key]
        link = f'<a href="#{ids[key]}">{name}</a>' if key in ids else name
        cells = [f"<td>{version}</td>"]
        for heading, text in columns.items():
            style = ' class="bad"' if heading == "Failures/s" and activity.failed_per_s else ""
            cells.append(f"<td{style}>{text(activity)}</td>")
        rows.append(f'<tr><th scope="row">{link}</th>{"".join(cells)}</tr>')
    headings = "".join(f'<th scope="col">{heading}</th>' for heading in ("Model", "Version", *columns))
    body = "\n".join(rows)
    return (
        '<div class="scroll"><table>\n<caption>Models</caption>\n'
        f"<thead><tr>{headings}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _figure(plot: _Plot, key: Version, intervals: Sequence[Interval], began_s: float) -> str:
    """Empty if the model has nothing of the kind."""
    read = [(one.taken_s, plot.read(one.models[key]) if key in one.models else None) for one in intervals]
    names = list(dict.fromkeys(name for _, values in read for name in values or ()))
    if not names:
        return ""
    # Failures without a reason are none.
    names = [name for name in names if name] or names
    lines = [
        [(at_s, None if values is None else values.get(name, plot.absent)) for at_s, values in read] for name in names
    ]
    high = max((value for line in lines for _, value in line if value is not None), default=0.0)
    now = {name: plot.text(line[-1][1]) for name, line in zip(names, lines, strict=True)}
    top = plot.text(high)
    says = f"now {', '.join(f'{name} {text}'.strip() for name, text in now.items())}; at most {top}"
    drawn = sparkline(plot.title, says, (began_s, intervals[-1].taken_s), plot.high or high, lines)
    values = "".join(
        f"<span>{_key(number, name) if name else ''}{text}</span>" for number, (name, text) in enumerate(now.items())
    )
    return f"<figure><figcaption>{plot.title} <span>max {top}</span></figcaption><p>{values}</p>{drawn}</figure>"


def _key(number: int, name: str) -> str:
    return (
        f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true"><path class="line{number}" d="M0 5H10"/></svg>'
        f"<small>{escape(printable(name))}</small> "
    )


def _span(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{f'{seconds:.1f}'.removesuffix('.0')} s"
