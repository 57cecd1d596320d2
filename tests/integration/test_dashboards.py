"""The dashboard and the alerts use only names, labels and values that a real server exports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.errors import ExecutionError
from paceline.server.config import Settings
from tests import decoder_models
from tests.decoder_models import TINY
from tests.harness import REPO
from tests.integration.serving import echo_model, failure_of, serving
from tests.wire import infer, rows_of_floats

DEPLOY = REPO / "deploy" / "observability"
RULES, DASHBOARD = DEPLOY / "prometheus-rules.yaml", DEPLOY / "grafana-dashboard.json"
OF_PROMETHEUS = {"up"}
OF_SCRAPES = {"job", "instance"}
_SERIES = re.compile(r"^([\w:]+)(?:\{(.*)\})? \S+$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PLACEHOLDER = re.compile(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}")

Series = dict[str, dict[str, set[str]]]


@pytest.fixture
async def exported(tmp_path: Path) -> Series:
    """Labels and their values by metric, from a server that has all metrics, after a success and a failure."""
    model = echo_model()
    decoder_models.write(TINY, tmp_path / "decoder" / "1")
    settings = Settings(paths=(tmp_path,), frontends=2)
    async with serving(tmp_path, {"m": model}, settings=settings) as served:
        await served.infer(infer("m", {"a": rows_of_floats(3)}))
        model.faults.raise_next(ExecutionError("no"))
        await failure_of(served.infer(infer("m", {"a": rows_of_floats(1)})))
        lines = await served.metrics()
    found: Series = defaultdict(lambda: defaultdict(set))
    for line in lines:
        match = _SERIES.match(f"{line} 0")
        assert match, line
        found[match[1]].update()
        for name, value in _LABEL.findall(match[2] or ""):
            found[match[1]][name].add(value)
    return found


@dataclass
class Query:
    """The names in an expression."""

    selectors: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)

    def labels(self, exported: Series) -> set[str]:
        return OF_SCRAPES | {label for name, _ in self.selectors for label in exported.get(name, {})}


def parsed(expression: str) -> Query:
    parser = pytest.importorskip("promql_parser", reason="promql-parser isn't installed")
    query = Query()

    def visit(node: Any) -> None:
        if isinstance(node, parser.VectorSelector):
            matchers = [(str(one.op), one.name, one.value) for one in node.matchers.matchers]
            query.selectors.append((node.name, matchers))
        elif isinstance(node, parser.AggregateExpr) and node.modifier is not None:
            query.grouped.update(node.modifier.labels)

    parser.walk(parser.parse(expression.replace("$__rate_interval", "5m")), visit)
    assert query.selectors, expression
    return query


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="pyyaml isn't installed")
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """The owner of each expression, and the expression."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]


def test_expressions_name_only_what_a_server_exports(exported: Series) -> None:
    for whose, expression in expressions():
        query = parsed(expression)
        for name, matchers in query.selectors:
            assert name in exported or name in OF_PROMETHEUS, f"{whose}: {name}"
            for op, label, value in matchers:
                assert label in OF_SCRAPES or label in exported[name], f"{whose}: {name} has no label {label}"
                if label not in OF_SCRAPES and "$" not in value:
                    assert value in exported[name][label], f"{whose}: {name} has no {label}{op}{value}"
        assert query.grouped <= query.labels(exported), whose


def test_expressions_with_unknown_names_would_be_found(exported: Series) -> None:
    query = parsed('sum by (colour) (rate(nv_inference_count_total{hue="1"}[5m]))')
    assert query.selectors[0][0] not in exported
    assert query.grouped - query.labels(exported) == {"colour"}


def test_quantiles_keep_the_bounds_of_their_buckets() -> None:
    for whose, expression in expressions():
        if "histogram_quantile" in expression:
            assert "le" in parsed(expression).grouped, whose


def test_legends_and_texts_use_labels_that_their_expressions_have(exported: Series) -> None:
    for panel in panels():
        for target in panel["targets"]:
            query = parsed(target["expr"])
            left = query.grouped or query.labels(exported)
            assert set(_PLACEHOLDER.findall(target["legendFormat"])) <= left, panel["title"]
    for rule in rules():
        query = parsed(rule["expr"])
        left = query.grouped or query.labels(exported)
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= left, rule["alert"]


def test_variables_query_existing_labels(exported: Series) -> None:
    asked = [one["query"]["query"] for one in json.loads(DASHBOARD.read_text())["templating"]["list"][1:]]
    assert len(asked) == 4
    for query in asked:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match, query
        ((name, _),) = parsed(match[1]).selectors
        assert name in exported
        assert match[2] in OF_SCRAPES | set(exported[name])


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    board = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in board}) == len(board)
    taken: set[tuple[int, int]] = set()
    for panel in board:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_alerts_have_unique_names_a_severity_and_a_summary() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def promtool() -> str:
    found = shutil.which("promtool", path=os.pathsep.join((str(REPO / ".witness"), os.environ["PATH"])))
    return found or pytest.skip("no promtool: `make witness` fetches it")


def test_rules_are_accepted_by_prometheus() -> None:
    done = subprocess.run([promtool(), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_alerts_fire_when_they_should_according_to_promtool() -> None:
    case = Path(__file__).with_name("prometheus-rules.test.yaml")
    done = subprocess.run([promtool(), "test", "rules", str(case)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
