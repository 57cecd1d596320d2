"""The documents agree with the code. Each promise of docs/behaviour.md and each row of docs/protocol.md names a test
that exists, in a comment that readers don't see; the latter has each RPC, parameter, header and field of ModelConfig,
and docs/architecture.md each module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from paceline.backends.generation import PARAMETERS, UNSUPPORTED
from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2
from paceline.server.cli import serve
from paceline.server.codec.parameters import KNOWN
from paceline.server.errors import STATUS_OF
from paceline.server.flags import Flag, Section
from paceline.server.models.batch_policy import OWN_PARAMETERS, OwnSettings
from paceline.server.rpc.standard_services import HEALTH_SERVICE, INFERENCE_SERVICE, SERVICES
from tests.deploy.commands import all_commands, flags_of
from tests.harness import REPO
from tests.unit.server.models.test_config_fields import IGNORED, READ, REFUSED

ARCHITECTURE = REPO / "docs" / "architecture.md"
BEHAVIOUR, PROTOCOL = REPO / "docs" / "behaviour.md", REPO / "docs" / "protocol.md"
CONFIGURATION, OPERATIONS = REPO / "docs" / "configuration.md", REPO / "docs" / "operations.md"
_REFERENCE = re.compile(r"([\w/]+\.py)::(\w+)")
_PROMISE = re.compile(r"^(- |\| (?!what|---))")


def promises() -> list[str]:
    """Every sentence of a list and every row of a table."""
    return [line for line in BEHAVIOUR.read_text(encoding="utf-8").splitlines() if _PROMISE.match(line)]


def references() -> list[tuple[str, str]]:
    texts = [path.read_text(encoding="utf-8") for path in (BEHAVIOUR, PROTOCOL)]
    return sorted(set(_REFERENCE.findall("".join(texts))))


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of tests that a file below tests/ defines or assigns; none if there is no such file."""
    names: set[str] = set()
    path = REPO / "tests" / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if name.lower().startswith("test"))


def test_behaviour_has_more_than_200_promises() -> None:
    assert len(promises()) > 200


def test_behaviour_every_promise_names_its_test() -> None:
    assert [promise for promise in promises() if not _REFERENCE.search(promise)] == []


@pytest.mark.parametrize("page", [BEHAVIOUR, PROTOCOL], ids=lambda page: page.name)
def test_names_of_tests_are_out_of_the_readers_way(page: Path) -> None:
    shown = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert _REFERENCE.findall(shown) == []


def test_every_named_test_exists() -> None:
    named = references()
    assert len(named) > 500
    assert [one for one in named if one[1] not in names_in(one[0])] == []


# ---- docs/architecture.md -------------------------------------------------------------------------------------------


def test_architecture_names_each_module_of_server_and_scheduler_and_no_missing_one() -> None:
    named = {
        name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.read_text(encoding="utf-8"))
    }
    modules = {path.name for folder in ("server", "scheduler") for path in (REPO / folder).rglob("[a-z]*.py")}
    elsewhere = {
        path.name for folder in ("backends", "clients", "protos", "tests") for path in (REPO / folder).rglob("*.py")
    }
    assert modules - named == set()
    assert named - modules - elsewhere == set()


@cache
def members() -> dict[str, set[str]]:
    """The members of each class of the product, by the class's name: methods, fields, and what its methods assign."""
    found: dict[str, set[str]] = {}
    for package in ("server", "scheduler", "backends", "clients", "protos"):
        for path in (REPO / package).rglob("[a-z]*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(_members(node))
    return found


def _members(owner: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        yield one.id
                    elif isinstance(one, ast.Attribute):
                        yield one.attr


def named_members() -> list[str]:
    """Every `Class.member` in backquotes in docs/architecture.md, and any in its section on the way of a request."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    way = text[text.index("## The way of a request") :].split("\n\n")[1]
    found = {*re.findall(r"`([A-Z]\w+\.\w+)[`(]", text), *re.findall(r"\b([A-Z]\w+\.\w+)", way)}
    return sorted(name for name in found if not name.endswith(".md"))


def test_architecture_members_are_found_at_all() -> None:
    assert {"BatchQueue.push", "Request.tag", "Suspects.again"} <= set(named_members())


def test_architecture_names_existing_members() -> None:
    named = [name.partition(".") for name in named_members()]
    assert [f"{owner}.{member}" for owner, _, member in named if member not in members().get(owner, set())] == []


# ---- docs/protocol.md ------------------------------------------------------------------------------------------------

DIFFERENCES = "Where this differs from Triton"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table below `heading` of `part`: the names in its first cell, and all of its cells."""

    part: str
    heading: str
    names: tuple[str, ...]
    cells: tuple[str, ...]


def rows() -> Iterator[Row]:
    part = heading = ""
    for before, line in pairwise([*PROTOCOL.read_text(encoding="utf-8").splitlines(), ""]):
        if before.startswith("#"):
            heading = before.lstrip("# ").replace("`", "")
            part = heading if before.startswith("## ") else part
        elif before.startswith("| ") and not line.startswith("|---"):
            cells = tuple(cell.strip() for cell in before.strip("|").split("|"))
            yield Row(part, heading, tuple(names_of(cells[0])), cells)


def names_of(cell: str) -> Iterator[str]:
    """The names in backquotes; `a.{b,c}` is a.b and a.c."""
    for name in re.findall(r"`([^`]+)`", cell):
        start, brace, rest = name.partition("{")
        yield from (start + end for end in rest.rstrip("}").split(",")) if brace else (name,)


ROWS = list(rows())
NAMED = {name for row in ROWS for name in row.names}


def below(*headings: str) -> list[str]:
    assert all(any(row.heading == heading for row in ROWS) for heading in headings)
    return [name for row in ROWS if row.heading in headings for name in row.names]


def strings(node: ast.AST) -> Iterator[str]:
    yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


@cache
def keys_in_code() -> set[str]:
    """The keys of parameters and headers that the server reads or writes: strings with certain prefixes anywhere in its
    code, except for metrics, and all keys that something called `parameters` is indexed with or searched for."""
    found: set[str] = set()
    of_flags = {REPO / "server" / name for name in ("check.py", "cli.py", "model_flags.py")}
    for path in sorted({*(REPO / "server").rglob("*.py")} - of_flags):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Subscript) and _is_parameters(node.value):
                found |= set(strings(node.slice))
            elif isinstance(node, ast.Compare) and _is_parameters(node.comparators[0]):
                found |= set(strings(node.left))
            elif isinstance(node, ast.Constant):
                pattern = r"(paceline|triton|sequence|shared_memory|log|trace)_\w*[a-z]"
                found |= {text for text in strings(node) if re.fullmatch(pattern, text)}
    metrics = set(re.findall(r"`(paceline_\w+)`", (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")))
    return found - metrics - {"sequence_batching", "trace_id"}  # a field of ModelConfig, and one of log lines


def _is_parameters(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "parameters"


def names_its_test_and_outcome(row: Row) -> bool:
    if row.part == DIFFERENCES:
        is_whole = len(row.cells) == 4
    else:
        is_whole = len(row.cells) == 3 and row.cells[1] in ("works", "ignored", "refused")
    return is_whole and _REFERENCE.search(row.cells[-1]) is not None


def test_protocol_every_row_names_its_test_and_its_outcome() -> None:
    assert len(ROWS) > 150
    assert [row.cells for row in ROWS if not names_its_test_and_outcome(row)] == []


def test_protocol_has_each_rpc_once() -> None:
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
    health = {"List", *(method.name for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods)}
    reflection = [method.name for method in reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods]
    others = {name: health if name == HEALTH_SERVICE else reflection for name in SERVICES if name != INFERENCE_SERVICE}
    expected = [*methods, *(f"{service}/{name}" for service, names in others.items() for name in names)]
    assert sorted(below("RPCs")) == sorted(expected)


def test_protocol_has_each_parameter_and_header() -> None:
    assert {"classification", "unload_dependents", "config", "triton_grpc_error", "trace_level"} <= keys_in_code()
    assert sorted((KNOWN.keys() | keys_in_code()) - NAMED) == []
    assert set(below("Of inference requests")) - {"triton_", "paceline_"} == KNOWN.keys() | {*PARAMETERS, *UNSUPPORTED}


@pytest.mark.parametrize(("outcome", "fields"), [("works", READ), ("ignored", IGNORED), ("refused", REFUSED)])
def test_protocol_lists_each_field_of_the_configuration_under_its_outcome(
    outcome: str, fields: dict[str, object]
) -> None:
    found = [name for row in ROWS if row.heading == "ModelConfig" and row.cells[1] == outcome for name in row.names]
    assert sorted(found) == sorted(fields)


def test_protocol_separates_supported_flags_from_missing_ones() -> None:
    text = PROTOCOL.read_text(encoding="utf-8").partition("### Flags")[2]
    taken, missing = (set(re.findall(r"`(--[\w-]+)`", part)) for part in text.split("All others"))
    ours = {option for parameter in serve.params for option in parameter.opts}
    assert len(taken) > 20
    assert taken <= ours
    assert not missing & ours


# ---- docs/configuration.md, SECURITY.md -----------------------------------------------------------------------------


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
