"""What users install: the wheel's content, its command, and a lock file that belongs to pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
PACKAGES = {"protos", "server", "scheduler", "backends", "clients"}

USER = """
import asyncio

import numpy as np

from clients import AsyncInferenceClient, InferenceError, InferResult, InferenceClient, Tls
from protos.inference_pb2 import ModelInferRequest

ROW = np.zeros((1, 4), np.float32)


def block() -> InferResult:
    with InferenceClient("127.0.0.1:8001", tls=Tls(ca="ca.crt"), token="t", timeout_s=None) as client:
        client.wait_ready(5)
        print(client.model_metadata("m", timeout_s=1).inputs[0].shape, client.health())
        return client.infer("m", {"x": ROW}, outputs=["y"], parameters={"priority": 1}, datatypes={"x": "FP32"})


async def share() -> list[float]:
    async with AsyncInferenceClient("127.0.0.1:8001", transport="stream", coalesce=32) as client:
        try:
            results = await asyncio.gather(*(client.infer("m", {"x": ROW}) for _ in range(8)))
        except InferenceError as error:
            raise SystemExit(error.message) from error
    return [float(result["y"].sum()) for result in results]


print(ModelInferRequest(model_name="m").SerializeToString())
"""
WRONG = """
InferenceClient("h:1").infer("m", {"x": ROW}, version=1)
AsyncInferenceClient("h:1", transport="pigeon")
block().nothing
ModelInferRequest(model_name=3)
"""


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


def test_wheel_installs_the_command_paceline(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "paceline = server.__main__:main" in wheel.read(entry_points).decode()


def test_wheel_marks_each_package_as_typed(wheel: zipfile.ZipFile) -> None:
    assert {name.partition("/")[0] for name in wheel.namelist() if name.endswith("/py.typed")} == PACKAGES


def test_mypy_checks_programs_of_users_against_the_installed_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """In a separate environment, as mypy requires the marker only of installed packages."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    wheel.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "user.py").write_text(USER + WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache")]
    python = str(tmp_path / "env" / "bin" / "python")
    checked = subprocess.run(
        [*command, "--python-executable", python, "user.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    found = re.findall(r"^user\.py:(\d+): error: .*\[([\w-]+)\]$", checked.stdout, re.MULTILINE)
    first = len(USER.splitlines()) + 2
    expected = ["arg-type", "arg-type", "attr-defined", "arg-type"]
    assert found == [(str(first + place), kind) for place, kind in enumerate(expected)], checked.stdout + checked.stderr


def locked() -> dict[str, list[tuple[Version, Requirement]]]:
    """Versions by normalized name; a package may be listed several times, for different environments."""
    found: dict[str, list[tuple[Version, Requirement]]] = {}
    for line in re.findall(r"^[a-z0-9].*?(?= \\)", (REPO / "requirements.lock").read_text(), re.MULTILINE):
        requirement = Requirement(line)
        version = Version(next(iter(requirement.specifier)).version)
        found.setdefault(requirement.name, []).append((version, requirement))
    return found


@pytest.mark.parametrize(
    "line",
    [
        *PROJECT["dependencies"],
        *(one for extra in ("cuda", "dev", "otel") for one in PROJECT["optional-dependencies"][extra]),
    ],
)
def test_lock_satisfies_the_requirements_of_pyproject(line: str) -> None:
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


_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("hypothesis", "jsonschema", "promql_parser", "tritonclient", "yaml")))
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_gpu_tests_are_collected_with_only_their_own_requirements_installed() -> None:
    """As in an environment that others have prepared for a machine with a GPU (bench/README.md)."""
    recipe = (REPO / "Makefile").read_text().partition("test-gpu: ")[2].splitlines()[1]
    options = re.findall(r"-[oW] \S+", recipe.partition("-ra")[0])
    files = [str(one) for one in (REPO / "tests").rglob("test_*.py") if "mark.gpu" in one.read_text()]
    arguments = [word for option in options for word in option.split()] + ["-m", "gpu", "--collect-only", "-q", *files]
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT, *arguments],
        cwd=REPO,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
