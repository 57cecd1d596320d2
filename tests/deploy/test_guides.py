"""What the guides name exists: flags, variables, links, methods of the client. tests/docs runs what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.clients import InferenceClient, errors
from tests.deploy.commands import all_commands, flags_of
from tests.harness import REPO

GUIDES = sorted((REPO / "docs" / "guides").glob("*.md"))

# Other programs' flags that guides name, with the program.
OTHERS = {
    "--build-arg": "docker",
    "--go-grpc_opt": "protoc",
    "--go-grpc_out": "protoc",
    "--go_opt": "protoc",
    "--go_out": "protoc",
    "--grpc_python_out": "protoc",
    "--http-port": "tritonserver",
    "--log-verbose": "tritonserver",
    "--model": "optimum-cli",
    "--no-deps": "pip",
    "--python_out": "protoc",
    "--predictor_protocol": "transformers in KServe",
}

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_LINK = re.compile(r"\]\(([^)\s]+)\)")

each_guide = pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as Markdown viewers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_all_guides_exist() -> None:
    wanted = {"kserve", "kubernetes", "from-triton", "from-mlserver", "from-kserve-batcher"}
    assert wanted <= {guide.stem for guide in GUIDES}


@each_guide
def test_guide_names_only_flags_that_exist(guide: Path) -> None:
    ours = {flag for command in all_commands() for flag in flags_of(command)}
    assert set(_FLAG.findall(guide.read_text())) <= ours | OTHERS.keys()


@each_guide
def test_guide_names_only_variables_that_exist(guide: Path) -> None:
    named = set(re.findall(r"\bPACELINE_[A-Z_]+", guide.read_text()))
    commands = all_commands()
    serve = {f"PACELINE_{each.name}".upper() for each in commands["serve"].params if each.name}
    bulk = {each.envvar for each in commands["bulk"].params}
    assert named <= serve | bulk | {"PACELINE_HEALTH_SERVER"}


@each_guide
def test_guide_has_no_broken_links(guide: Path) -> None:
    for link in _LINK.findall(guide.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        page = (guide.parent / path).resolve() if path else guide
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


def test_every_listed_flag_of_other_programs_is_used_in_a_guide() -> None:
    text = "".join(guide.read_text() for guide in GUIDES)
    assert OTHERS.keys() <= set(_FLAG.findall(text))


def test_guide_names_all_methods_and_errors_of_the_client() -> None:
    guide = (REPO / "docs" / "guides" / "python-client.md").read_text(encoding="utf-8")
    methods = {name for name in vars(InferenceClient) if not name.startswith("_")} - {"close"}
    assert {name for name in methods if f"`{name}(" not in guide} == set()
    raised = {
        name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.ClientError)
    }
    assert {name for name in raised if f"`{name}`" not in guide} == set()
