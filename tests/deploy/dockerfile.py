"""The Dockerfile, parsed, and its build stage run in a folder, where there is no container engine.

Lives here: `Stage`, `stages`, and a program: `python -m tests.deploy.dockerfile ROOT` runs what the build stage runs,
with ROOT as the root of its file system. Must not: assertions.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import REPO

__all__ = ["DOCKERFILE", "Instruction", "Stage", "build_in", "stages"]

DOCKERFILE = REPO / "deploy" / "container" / "Dockerfile"

_PYTHON = shlex.quote(sys.executable)
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its keyword, flags and the rest, lines joined."""

    keyword: str
    flags: tuple[str, ...]
    text: str

    @property
    def words(self) -> list[str]:
        """The rest, split into words, whether it is written in JSON or not."""
        if self.text.startswith("["):
            words: list[str] = json.loads(self.text)
            return words
        return shlex.split(self.text)


@dataclass(slots=True)
class Stage:
    """One FROM and the instructions after it; the ARGs at the top of the file are a stage without a base."""

    base: str = ""
    name: str = ""
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, keyword: str) -> list[Instruction]:
        return [each for each in self.instructions if each.keyword == keyword]

    def only(self, keyword: str) -> Instruction:
        (found,) = self.all(keyword)
        return found

    def pairs(self, keyword: str) -> dict[str, str]:
        """KEY=VALUE of all such instructions; a KEY alone has an empty value."""
        words = [word for each in self.all(keyword) for word in each.words]
        return {key: value for key, _, value in (word.partition("=") for word in words)}


def stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile, beginning with the part before the first FROM."""
    found = [Stage()]
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        keyword, _, rest = line.strip().partition(" ")
        words = rest.split()
        if keyword == "FROM":
            found.append(Stage(words[0], words[2] if len(words) > 2 else ""))
            continue
        flags = []
        if keyword != "RUN":
            while rest.lstrip().startswith("--"):
                flag, _, rest = rest.lstrip().partition(" ")
                flags.append(flag)
        if keyword == "HEALTHCHECK":
            rest = rest.strip().removeprefix("CMD")
        found[-1].instructions.append(Instruction(keyword, tuple(flags), rest.strip()))
    return found


def build_in(root: Path, stage: Stage) -> None:
    """Run what `stage` runs, with `root` as its file system and this Python as its own. Raises CalledProcessError."""
    work, variables = root, stage.pairs("ARG")
    for each in stage.instructions:
        if each.keyword == "WORKDIR":
            work = root / each.text.lstrip("/")
            work.mkdir(parents=True, exist_ok=True)
        elif each.keyword == "COPY":
            *sources, target = each.words
            _copy(sources, work, target)
        elif each.keyword == "RUN":
            command = _VARIABLE.sub(lambda match: variables[match[1]], each.text).replace("/opt/", f"{root}/opt/")
            command = re.sub(r"(^|&& )python ", lambda match: f"{match[1]}{_PYTHON} ", command)
            subprocess.run(["/bin/sh", "-ec", command], cwd=work, check=True)


def _copy(sources: list[str], work: Path, target: str) -> None:
    for source in map(REPO.joinpath, sources):
        place = work / target
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)


def main(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    _, build, *_ = stages(DOCKERFILE.read_text())
    build_in(root, build)
    shutil.rmtree(root / "src")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
