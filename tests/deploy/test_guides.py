"""Flags, commands and links that the guides show exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.deploy.commands import accepted, all_commands, flags_of
from tests.harness import REPO

GUIDES = sorted((REPO / "docs" / "guides").glob("*.md"))

# Other programs' flags that guides name, with the program.
OTHERS = {
    "--build-arg": "docker",
    "--go-grpc_opt": "protoc",
    "--go-grpc_out": "protoc",
    "--go_opt": "protoc",
    "--go_out": "protoc",
    "--http-port": "tritonserver",
    "--log-verbose": "tritonserver",
    "--predictor_protocol": "transformers in KServe",
}

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"^    (?:\$ )?paceline (.+)$", re.MULTILINE)

each_guide = pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)


def commands() -> list[tuple[str, str]]:
    return [(guide.stem, line) for guide in GUIDES for line in _COMMAND.findall(guide.read_text())]


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as Markdown viewers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_all_guides_exist() -> None:
    wanted = {"kserve", "kubernetes", "from-triton", "from-mlserver", "from-kserve-batcher"}
    assert wanted <= {guide.stem for guide in GUIDES}
    assert len(commands()) >= 5


@each_guide
def test_guide_names_only_flags_that_exist(guide: Path) -> None:
    ours = {flag for command in all_commands() for flag in flags_of(command)}
    assert set(_FLAG.findall(guide.read_text())) <= ours | OTHERS.keys()


@each_guide
def test_guide_names_only_variables_that_exist(guide: Path) -> None:
    named = set(re.findall(r"\bPACELINE_[A-Z_]+", guide.read_text()))
    serve = {f"PACELINE_{each.name}".upper() for each in all_commands()["serve"].params if each.name}
    assert named <= serve | {"PACELINE_HEALTH_SERVER"}


@pytest.mark.parametrize(("guide", "line"), commands())
def test_guide_shows_commands_that_paceline_accepts(guide: str, line: str) -> None:
    accepted(shlex.split(line, comments=True))


@each_guide
def test_guide_has_no_broken_links(guide: Path) -> None:
    for link in _LINK.findall(guide.read_text()):
        path, _, anchor = link.partition("#")
        page = (guide.parent / path).resolve() if path else guide
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


def test_every_listed_flag_of_other_programs_is_used_in_a_guide() -> None:
    text = "".join(guide.read_text() for guide in GUIDES)
    assert OTHERS.keys() <= set(_FLAG.findall(text))
