"""What users install: the wheel's content, its command, and a lock file that belongs to pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
PACKAGES = {"protos", "server", "scheduler", "backends", "clients"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(target)]
    subprocess.run([*command, str(REPO)], check=True, capture_output=True, timeout=120)
    return zipfile.ZipFile(next(target.glob("*.whl")))


def test_wheel_contains_the_five_packages_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", *sorted(PACKAGES)], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert {name.partition("/")[0] for name in inside} == PACKAGES
    assert inside >= set(tracked.stdout.split())


def test_wheel_says_that_its_packages_have_types(wheel: zipfile.ZipFile) -> None:
    assert {f"{name}/py.typed" for name in PACKAGES} <= set(wheel.namelist())


def test_wheel_installs_the_command_paceline(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "paceline = server.__main__:main" in wheel.read(entry_points).decode()


def locked() -> dict[str, list[tuple[Version, Requirement]]]:
    """Versions by normalized name; a package may be there several times, for different environments."""
    found: dict[str, list[tuple[Version, Requirement]]] = {}
    for line in re.findall(r"^[a-z0-9].*?(?= \\)", (REPO / "requirements.lock").read_text(), re.MULTILINE):
        requirement = Requirement(line)
        version = Version(next(iter(requirement.specifier)).version)
        found.setdefault(requirement.name, []).append((version, requirement))
    return found


@pytest.mark.parametrize(
    "line",
    [*PROJECT["dependencies"], *(one for extra in ("dev", "otel") for one in PROJECT["optional-dependencies"][extra])],
)
def test_lock_satisfies_what_pyproject_asks_for(line: str) -> None:
    wanted = Requirement(line)
    versions = locked().get(wanted.name.lower())
    assert versions, f"requirements.lock has no {wanted.name}: run make lock"
    for version, _ in versions:
        assert version in wanted.specifier, f"requirements.lock has {wanted.name} {version}: run make lock"


def test_lock_never_installs_both_flavours_of_onnxruntime() -> None:
    lock = locked()
    for platform, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")):
        environment = {"sys_platform": platform, "platform_machine": machine}
        flavours = [
            name
            for name in ("onnxruntime", "onnxruntime-gpu")
            for _, requirement in lock[name]
            if requirement.marker is None or requirement.marker.evaluate(environment)
        ]
        assert len(flavours) == 1, (platform, machine, flavours)
