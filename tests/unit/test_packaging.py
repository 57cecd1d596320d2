"""What users install: what wheel and source distribution contain, how that lives with other projects, and a lock file
that belongs to pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from paceline import InferenceClient
from tests.harness import REPO, ServerProcess, write_identity
from tests.unit.product_modules import PACKAGES, modules

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]

OWN_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "theirs"
version = "1"

[tool.hatch.build.targets.wheel]
packages = ["server", "clients", "protos", "scheduler", "backends"]
"""

USER = """
import asyncio

import numpy as np

from paceline import AsyncInferenceClient, InferenceError, InferResult, InferenceClient, Tls
from paceline.protos.inference_pb2 import ModelInferRequest

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
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Path:
    """The interpreter of a new environment with paceline, as a wheel or editable, and with all that it needs."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # Packages alone: what this environment's own .pth files add stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "env" / "bin" / "python"
    _install(python, str(wheel) if request.param == "wheel" else f"--editable={REPO}")
    return python


def _install(python: Path, what: str) -> None:
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    _run(Path(sys.executable), REPO, "-m", "pip", "--python", str(python), "install", *options, what)


def _run(python: Path, cwd: Path, *arguments: str) -> str:
    done = subprocess.run([python, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _content(wheel: Path) -> dict[str, bytes]:
    inside = zipfile.ZipFile(wheel)
    return {name: inside.read(name) for name in inside.namelist()}


def _tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=REPO, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def test_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {f"paceline/{name}" for name in _tracked(*PACKAGES)} | {
        "paceline/__init__.py",
        "paceline/__main__.py",
        "paceline/py.typed",
    }


def test_wheel_from_the_source_distribution_is_the_same(dist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as source:
        source.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert {path.name for path in root.iterdir()} == {
        *("paceline", "docs", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore")
    }
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120)
    assert _content(next((root / "dist").glob("*.whl"))) == _content(wheel)


def test_installed_package_lives_beside_projects_with_its_folders(python: Path, tmp_path: Path) -> None:
    version = f"paceline, version {PROJECT['version']}\n"
    assert _run(python.parent / "paceline", tmp_path, "--version") == version
    assert _run(python, tmp_path, "-m", "paceline", "--version") == version
    code = f"import importlib.util as u; print([n for n in {sorted(PACKAGES)} if u.find_spec(n)])"
    assert _run(python, tmp_path, "-c", code) == "[]\n"
    code = "import sys, paceline; print(sorted({'grpc', 'numpy', 'google.protobuf'} & set(sys.modules)))"
    assert _run(python, tmp_path, "-c", code) == "[]\n"

    for package_file in ("", "__init__.py"):
        theirs = _project(tmp_path / f"with{package_file}", package_file)
        assert _run(python, theirs, "-m", "server.main") == "theirs\n"
        _install(python, f"--editable={theirs}")
        code = "from clients.billing import call; from paceline import InferenceClient; print(call(), InferenceClient)"
        assert _run(python, tmp_path, "-c", code) == "theirs <class 'paceline.clients.sync.InferenceClient'>\n"
        assert _run(python, theirs, "-m", "server.main") == "theirs\n"
        write_identity(theirs / "models")
        program = ("/bin/sh", "-c", f'cd "{theirs}"; exec "{python}" -m paceline "$@"', "sh")
        with ServerProcess(theirs / "models", program=program) as ours, InferenceClient(ours.target) as client:
            row = np.ones((1, 16), np.float32)
            assert np.array_equal(client.infer("echo", {"INPUT0": row})["OUTPUT0"], row)


def _project(folder: Path, package_file: str) -> Path:
    """A project that has our folders' names for its own, with a file in each if it is a regular package."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        if package_file:
            (folder / name / package_file).touch()
    (folder / "clients" / "billing.py").write_text("def call() -> str:\n    return 'theirs'\n")
    (folder / "server" / "main.py").write_text("from clients.billing import call\n\nprint(call())\n")
    (folder / "pyproject.toml").write_text(OWN_PROJECT)
    return folder


def test_modules_load_under_one_name_each() -> None:
    names, folders = sorted(modules()), [str(REPO / package) for package in PACKAGES]
    code = (
        f"import importlib, sys; [importlib.import_module('paceline.' + name) for name in {names!r}]\n"
        "from pathlib import Path\n"
        "files = [Path(m.__file__).resolve() for n, m in sys.modules.items() if getattr(m, '__file__', None)]\n"
        f"ours = [file for file in files if any(file.is_relative_to(folder) for folder in {folders!r})]\n"
        f"print(len(ours) - len(set(ours)), [n for n in sys.modules if n.partition('.')[0] in {sorted(PACKAGES)}])"
    )
    assert _run(Path(sys.executable), REPO, "-c", code) == "0 []\n"


def test_mypy_checks_programs_of_users_against_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """In a separate environment, as mypy requires the marker only of installed packages."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
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
