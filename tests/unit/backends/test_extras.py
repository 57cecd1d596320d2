"""Advice on what to install names packages that any index has, and all that pyproject.toml says."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.backends.installed import how_to_install
from tests.harness import REPO

EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_advice_names_all_packages_of_the_extra(extra: str) -> None:
    command, verb, *packages = shlex.split(how_to_install(extra))
    assert (command, verb) == ("pip", "install")
    assert sorted(packages) == sorted(each.partition(";")[0] for each in EXTRAS[extra])


def test_advice_is_for_clones_where_nothing_is_installed(tmp_path: Path) -> None:
    code = "import sys; sys.path.append(sys.argv[1]); "
    code += "from paceline.backends.installed import how_to_install as it; print(it('otel'))"
    without_packages = [sys.executable, "-S", "-c", code, str(REPO)]
    said = subprocess.run(without_packages, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said == "pip install '.[otel]' in a clone of paceline\n"


def test_no_advice_names_paceline_as_a_package_of_an_index() -> None:
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in ("backends", "bench", "clients", "examples", "protos", "scheduler", "server")
        for path in (REPO / folder).rglob("*.py")
    }
    assert [path for path, text in texts.items() if "paceline[" in text or "the extra '" in text] == []
