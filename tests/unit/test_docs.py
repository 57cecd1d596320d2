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

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from paceline.backends.generation import PARAMETERS, UNSUPPORTED
from paceline.protos import inference_pb2 as pb
from paceline.server.cli import serve
from paceline.server.codec.parameters import KNOWN
from paceline.server.rpc.standard_services import HEALTH_SERVICE, INFERENCE_SERVICE, SERVICES
from tests.harness import REPO
from tests.unit.server.models.config_fields import IGNORED, READ, REFUSED

ARCHITECTURE = REPO / "docs" / "architecture.md"
BEHAVIOUR, PROTOCOL = REPO / "docs" / "behaviour.md", REPO / "docs" / "protocol.md"
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
