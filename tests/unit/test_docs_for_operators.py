"""What operators read agrees with the code: each flag, limit and parameter with its default, the sections of flags,
metrics, alerts, what callers are told, files that are named, and figures, which were measured."""

from __future__ import annotations

import ast
import re

import click

from paceline.protos import model_config_pb2
from paceline.server.cli import serve
from paceline.server.codec.parameters import KNOWN
from paceline.server.errors import STATUS_OF
from paceline.server.flags import Flag, Section
from paceline.server.models.batch_policy import OWN_PARAMETERS, OwnSettings
from tests.deploy.commands import all_commands, flags_of
from tests.harness import REPO
from tests.unit.test_docs import names_of, strings

CONFIGURATION, OPERATIONS = REPO / "docs" / "configuration.md", REPO / "docs" / "operations.md"


def test_limits_are_listed_with_the_defaults_of_their_flags_and_their_metrics() -> None:
    text = (
        (REPO / "docs" / "configuration.md").read_text(encoding="utf-8").partition("### Limits")[2].partition("###")[0]
    )
    defaults = {option: parameter.default for parameter in serve.params for option in parameter.opts}
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]
    assert len(told) >= 12
    for _, flag, default, shown, refusals in told:
        (name,) = names_of(flag)
        assert shown.startswith("`"), name
        assert refusals.startswith(("`", "by gRPC", "none")), name
        if name.startswith("--"):
            assert int(default) == defaults[name], name
        else:
            owner = OwnSettings() if name.startswith("paceline.") else model_config_pb2.ModelQueuePolicy()
            assert default == f"{getattr(owner, name.rpartition('.')[2])}, none"
    flags = {name for _, flag, *_ in told for name in names_of(flag)}
    assert {
        option for option in defaults if re.match(r"--(grpc-)?max-(?!batch|queue-|latency|connection)", option)
    } <= flags


def test_configuration_has_each_flag_and_variables_are_named_like_them() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    for parameter in serve.params:
        if parameter.name != "paths":
            assert f"| `{max(parameter.opts, key=len)}`" in text or f"`{parameter.opts[0]}`" in text
            assert parameter.opts[0] == "--" + str(parameter.name).replace("_", "-"), "docs: the first name's variable"


def test_configuration_has_the_sections_of_all_flags() -> None:
    """The same flags as `--help-all`, in the same order."""
    parts = re.split(r"^### (.+)\n", CONFIGURATION.read_text(encoding="utf-8"), flags=re.MULTILINE)
    told = dict(zip(parts[1::2], parts[2::2], strict=True))
    sections = {
        part: [flag for row in re.findall(r"^\| (`--.+?) \|", told[part], re.MULTILINE) for flag in names_of(row)]
        for part in Section
    }
    flags: dict[str, list[str]] = {part: [] for part in Section}
    for each in serve.params:
        if isinstance(each, click.Option):
            assert isinstance(each, Flag), f"{each.opts}: of which section?"
            flags[each.section] += each.opts
    assert sections == flags
    assert [part for part in told if part in flags] == [*flags]


def test_configuration_has_each_of_our_parameters_and_no_others() -> None:
    table = CONFIGURATION.read_text(encoding="utf-8").partition("### `parameters` of our own")[2].partition("\n#")[0]
    assert set(re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE)) == OWN_PARAMETERS


def test_security_names_files_that_exist() -> None:
    text = (REPO / "SECURITY.md").read_text(encoding="utf-8")
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)
    assert len(files) >= 9
    assert [file for file in files if not (REPO / "tests" / file).is_file()] == []
    links = re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text)
    assert [link for link in links if not (REPO / link).exists()] == []


# ---- docs/guides/bulk.md --------------------------------------------------------------------------------------------


def test_guide_of_bulk_has_each_flag_with_its_default() -> None:
    guide = (REPO / "docs" / "guides" / "bulk.md").read_text(encoding="utf-8")
    cells = [line.split("|") for line in guide.partition("## Every flag")[2].splitlines() if line.startswith("| `")]
    told = {flag: default.strip().strip("`") for _, flags, default, *_ in cells for flag in names_of(flags)}
    expected: dict[str, str] = {}
    for each in all_commands()["bulk"].params:
        options = {*each.opts, *each.secondary_opts}
        if isinstance(each, click.Option) and not options & flags_of("top"):  # those are of all commands
            shown = f"{each.default:g}" if isinstance(each.default, float) else each.default
            expected |= dict.fromkeys(options, shown if isinstance(shown, str) else "")
    assert len(expected) > 20
    assert told == expected


# ---- docs/operations.md ---------------------------------------------------------------------------------------------


def table(heading: str) -> list[list[str]]:
    text = OPERATIONS.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def quoted() -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", OPERATIONS.read_text(encoding="utf-8")))


def test_operations_names_existing_flags() -> None:
    options = {option for command in all_commands().values() for one in command.params for option in one.opts}
    told = {flag for text in quoted() for flag in re.findall(r"(?:^| )(--[\w-]+)", text)}
    assert len(told) > 15
    assert told - options == set()


def test_operations_names_existing_metrics() -> None:
    exported = set(re.findall(r"\b(?:nv|paceline)_\w+", (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")))
    exported |= {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    told = {name for text in quoted() for name in re.findall(r"\b(?:nv|paceline|process)_\w+", text)}
    assert len(told) > 10
    assert told - exported - KNOWN.keys() == set()


def test_operations_has_each_alert_once_and_no_other() -> None:
    rules = (REPO / "deploy" / "observability" / "prometheus-rules.yaml").read_text(encoding="utf-8")
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert sorted(name for row in table("Alerts") for name in names_of(row[0])) == sorted(alerts)


def test_operations_has_each_status_with_messages_that_callers_get() -> None:
    said = "\n".join(
        text
        for package in ("server", "scheduler", "backends")
        for path in sorted((REPO / package).rglob("*.py"))
        for text in strings(ast.parse(path.read_text(encoding="utf-8")))
    )
    rows = table("What callers are told")
    words = [word for row in rows for word in re.findall("`(.+?)`", row[1])]
    assert len(words) > 20
    assert [word for word in words if word not in said] == []
    statuses = {status.name for status in STATUS_OF.values()} | {"UNAUTHENTICATED"}
    assert {name for row in rows for name in row[0].split(", ")} == statuses


# ---- docs/performance.md, docs/figures/worth.svg ---------------------------------------------------------------------


def numbers(text: str) -> set[str]:
    """Numbers as they are printed, without commas."""
    return {found.replace(",", "") for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}


def shown_figures() -> list[str]:
    """What the tables of docs/performance.md say of measurements, and the lengths of the chart's bars."""
    rows = [line for line in (REPO / "docs" / "performance.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
    chart = re.findall(r">([\d,]+)</text>", (REPO / "docs" / "figures" / "worth.svg").read_text(encoding="utf-8"))
    return sorted(numbers(" ".join([*cells, *chart])), key=float)


def test_figures_are_those_that_were_measured() -> None:
    measured = {
        float(number)
        for page in (REPO / "docs").glob("measurements*.md")
        for number in numbers(page.read_text(encoding="utf-8"))
    }
    shown = shown_figures()
    assert {"1597", "1530", "208", "0.85", "16.21"} <= set(shown)
    unknown = [one for one in shown if float(one) not in {round(each, len(one.partition(".")[2])) for each in measured}]
    assert unknown == []
