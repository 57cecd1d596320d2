"""The code that the documents show: blocks of commands, of Python, of configuration.

Lives here: finding it, and in which language it is. Must not: run anything.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from paceline.protos import model_config_pb2
from tests.harness import REPO

__all__ = ["Block", "blocks", "commands", "pages"]

_FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n(?:\n+(?= {4}))?)+")


@dataclass(frozen=True, slots=True)
class Block:
    """Code below `heading` of `page`. `language` is the word after the fence; of an indented block "pbtxt" if it is a
    model's configuration, "python" if it is Python, and otherwise "console"."""

    page: str
    heading: str
    language: str
    code: str


def pages() -> list[Path]:
    """The documents of this repository, except those of packages that tests have installed in it."""
    folders = [REPO / name for name in ("bench", "clients", "deploy", "docs", "examples", "protos", "server")]
    found = [*REPO.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    return sorted(page for page in found if "node_modules" not in page.parts)


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, from top to bottom."""
    name, text = page.relative_to(REPO).as_posix(), page.read_text(encoding="utf-8")
    found = [(at.start(), at["language"], at["code"]) for at in _FENCED.finditer(text)]
    prose = _FENCED.sub(lambda at: re.sub(r".", "-", at[0]), text)
    for at in _INDENTED.finditer(prose):
        code = re.sub(r"^ {4}", "", at[0], flags=re.MULTILINE)
        found.append((at.start(), _language_of(code), code))
    for start, language, code in sorted(found):
        *_, heading = ["", *re.findall(r"^#+ (.+)$", prose[:start], re.MULTILINE)]
        yield Block(name, heading, language, code)


def _language_of(code: str) -> str:
    try:
        text_format.Parse(code, model_config_pb2.ModelConfig())
    except text_format.ParseError:
        pass
    else:
        return "pbtxt"
    try:
        compile(code, "block", "exec")
    except SyntaxError:
        return "console"
    return "python"


def commands(code: str) -> Iterator[str]:
    """The commands of a block, without prompts: as many lines each as the shell needs."""
    command = ""
    for line in re.sub(r"^\$ ", "", code, flags=re.MULTILINE).splitlines():
        command += line + "\n"
        if (
            not line.endswith("\\")
            and subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0
        ):
            if command.strip():
                yield command.strip()
            command = ""
    assert not command, f"not a whole command: {command}"
