"""The status page, made of looks at a server: what it tells, in which order, and that names stay text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

from paceline.clients.snapshots import Model, Snapshot, between
from paceline.clients.status_page import status_page

AT = "2031-01-31 12:00:00 UTC"
VOID = {"meta"}


class Page(HTMLParser):
    """The page's tags, cells and texts. Every element that begins has to end."""

    def __init__(self, *models: dict[str, Model], refresh_s: int | None = None) -> None:
        super().__init__()
        looks = [
            Snapshot(10.0 + 5 * number, {(name, "1"): one for name, one in shown.items()}, ready=1)
            for number, shown in enumerate(models)
        ]
        intervals = [between(*pair) for pair in pairwise(looks)]
        self.text = status_page(intervals, "<b>paceline</b> 1", AT, refresh_s)
        self.tags: Counter[str] = Counter()
        self.cells: list[list[str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(self.text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self._open}:
            self.cells[-1][-1] += data
        if data.strip():
            self.texts.append(data.strip())

    def figures(self, title: str) -> Sequence[str]:
        return re.findall(rf"<figure><figcaption>{title} .*?</figure>", self.text)


def busy(requests: float, **more: object) -> Model:
    """After so many requests, in batches of four rows, that took up to 10 ms; one of two instances executed for a
    fourth of the time if there are 250 in 5 s."""
    times = {10_000.0: requests, math.inf: requests}
    return replace(
        Model(succeeded=requests, rows=requests, batches=requests / 4, slots=2, executing_us=10_000 * requests,
            queue=times, duration=times),
        **more,
    )  # fmt: skip


def test_table_has_a_row_for_each_model_in_order_of_names() -> None:
    page = Page({"z": busy(0), "a": Model()}, {"z": busy(250, waiting=3), "a": Model()})
    headings, *rows = page.cells
    assert headings == [
        "Model", "Version", "Requests/s", "Failures/s", "Rows/batch", "Waiting",
        "Queue p99", "Latency p50", "Latency p99", "Instances busy",
    ]  # fmt: skip
    assert rows == [
        ["a", "1", "0.0", "0.0", "-", "0", "-", "-", "-", "-"],
        ["z", "1", "50.0", "0.0", "4.0", "3", "9.9 ms", "5 ms", "9.9 ms", "25 %"],
    ]
    assert "ready, 50.0 requests/s, 3 waiting" in page.texts
    assert f"{AT}. Numbers are of the last 5 s, plots go back 5 s." in page.texts


def test_generating_model_shows_tokens_and_no_busy_instances() -> None:
    writer = busy(0, running=2.0, cache_share=0.5)
    first = {1e6: 5.0, math.inf: 5.0}
    page = Page({"w": writer}, {"w": replace(busy(5), running=3.0, cache_share=0.25, tokens=500, first_token=first)})
    shown = dict(zip(*page.cells, strict=True))
    assert [shown[name] for name in ("Instances busy", "Tokens/s", "First token p99")] == ["-", "100", "990 ms"]
    for title, value in {"Running": "3", "Key-value cache": "25 %", "First token after": "990 ms"}.items():
        assert f"{value}</span>" in page.figures(title)[0]
    assert not page.figures("Instances busy")


def test_each_reason_of_failures_is_a_line() -> None:
    page = Page({"m": busy(0)}, {"m": busy(9, failures={"REJECTED": 50, "OTHER": 0})}, {"m": busy(9)})
    assert page.figures("Failures/s")[0].count("<polyline") == 1
    page = Page({"m": busy(0)}, {"m": busy(9, failures={"REJECTED": 50, "CANCELED": 5})})
    (shown,) = page.figures("Failures/s")
    assert shown.count("<polyline") == 2
    assert re.findall(r"<small>(\w+)</small> ([\d.]+)</span>", shown) == [("REJECTED", "10.0"), ("CANCELED", "1.0")]
    assert '<td class="bad">11.0</td>' in page.text


def test_sequences_are_shown_where_there_are_any() -> None:
    assert not Page({"m": busy(0)}, {"m": busy(4)}).figures("Sequences")
    (shown,) = Page({"m": busy(0)}, {"m": busy(4, sequences={"live": 7.0, "waiting": 2.0})}).figures("Sequences")
    assert "now live 7, waiting 2; at most 7" in shown


def test_time_without_a_model_is_a_gap_in_its_lines() -> None:
    one, two = {"m": busy(4)}, {"m": busy(8)}
    (shown,) = Page(one, two, {}, one, two).figures("Waiting")
    assert shown.count("<polyline") == 2


def test_only_the_busiest_of_many_models_have_plots() -> None:
    names = [f"m{number:02}" for number in range(40)]
    page = Page(dict.fromkeys(names, busy(0)), {name: busy(int(name[1:])) for name in names})
    assert (len(page.cells), page.tags["section"], page.tags["a"]) == (41, 30, 30)
    assert "Plots are shown of the 30 busiest models only." in page.texts
    assert page.texts.count("m10") == 2
    assert page.texts.count("m09") == 1


def test_page_names_are_text_and_control_characters_are_not() -> None:
    name = '<script>alert("1")</script>&amp;\x1b'
    page = Page({name: busy(0)}, {name: busy(4, failures={"<i>": 5.0})})
    assert not page.tags.keys() & {"script", "b", "i"}
    assert page.texts.count(name.replace("\x1b", "?")) == 2
    assert "<b>paceline</b> 1" in page.texts


def test_page_needs_nothing_from_elsewhere_and_every_plot_has_words() -> None:
    page = Page({"m": busy(0)}, {"m": busy(4)})
    assert not re.search(r"://|url\(|@import|\bsrc=|\bon\w+=", page.text)
    assert page.tags["title"] - 1 == page.tags["desc"] == page.tags["figure"] == 7
    assert not re.search(r"<script|http-equiv", page.text)
    assert '<meta http-equiv="refresh" content="5">' in Page({}, {}, refresh_s=5).text


def test_page_without_models_or_numbers_says_so() -> None:
    assert "No models." in Page({}, {}).texts
    assert f"{AT}: there are no numbers yet." in Page({}).texts
