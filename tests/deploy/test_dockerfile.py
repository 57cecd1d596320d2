"""What can be checked of the Dockerfile without building it: where files come from, the user, that commands exist."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from tests.deploy.commands import accepted, all_commands
from tests.deploy.dockerfile import DOCKERFILE, Stage, stages
from tests.harness import REPO

FOLDER = DOCKERFILE.parent
HEAD, BUILD, LOCALE, FINAL = stages(DOCKERFILE.read_text())
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
_LOCKED = re.compile(r"^([a-z0-9-]+)==(\S+?)(?: ; (.*?))? \\$", re.MULTILINE)

LABELS = {"title", "description", "licenses", "version", "revision", "created", "source", "base.name"}


def locked(lock: Path) -> dict[str, set[str]]:
    """Versions by name."""
    found: dict[str, set[str]] = {}
    for name, version, _ in _LOCKED.findall(lock.read_text()):
        found.setdefault(name, set()).add(version)
    return found


def test_stages_share_a_base_so_that_the_environment_keeps_its_python() -> None:
    assert BUILD.base == LOCALE.base == FINAL.base == "${PYTHON_IMAGE}"
    assert re.search(r":\d+\.\d+-slim-\w+$", HEAD.pairs("ARG")["PYTHON_IMAGE"])


def test_image_has_a_supported_python() -> None:
    version = re.search(r"python:(\d+\.\d+)", HEAD.pairs("ARG")["PYTHON_IMAGE"])
    assert version
    assert tuple(map(int, version[1].split("."))) >= (3, 11)


def test_final_stage_runs_nothing_and_copies_only_from_the_others() -> None:
    assert not FINAL.all("RUN")
    assert not any(stage.all("ADD") for stage in (BUILD, LOCALE, FINAL))
    assert [(copy.flags, copy.text) for copy in FINAL.all("COPY")] == [
        (("--from=locale",), "/opt/locale/en_US.utf8 /usr/lib/locale/en_US.utf8"),
        (("--from=build",), "/opt/paceline /opt/paceline"),
    ]


def test_final_stage_runs_as_a_numeric_user_other_than_root() -> None:
    (user,) = FINAL.only("USER").words
    assert all(int(number) >= 1000 for number in user.split(":"))
    kept = [each.keyword for each in FINAL.instructions]
    assert kept.index("USER") < kept.index("ENTRYPOINT")


def test_variables_are_declared_in_their_stage_and_used() -> None:
    for stage in (BUILD, FINAL):
        declared = stage.pairs("ARG").keys()
        texts = [each.text for each in stage.instructions if each.keyword != "ARG"]
        used = {name for text in texts for name in re.findall(r"\$\{(\w+)\}", text)}
        assert used == declared


def test_install_steps_are_locked_by_hash_or_use_no_index() -> None:
    installs = [run.text for run in BUILD.all("RUN") if re.search(r" (install|wheel) ", run.text)]
    assert len(installs) == 4
    for text in installs:
        assert "--no-deps" in text
        assert "--require-hashes" in text or "--no-index" in text


@pytest.mark.parametrize("source", sorted({word for copy in BUILD.all("COPY") for word in copy.words[:-1]}))
def test_copied_source_exists_and_is_not_ignored(source: str) -> None:
    assert (REPO / source).exists()
    kept = [line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert any(fnmatch.fnmatch(source, pattern) for pattern in kept)


def test_copied_sources_include_all_that_the_wheel_is_made_of() -> None:
    copied = {word for copy in BUILD.all("COPY") for word in copy.words[:-1]}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    project = PROJECT["project"]
    assert {*wheel, "pyproject.toml", project["readme"], *project["license-files"]} <= copied


def test_command_and_health_check_are_accepted_by_paceline() -> None:
    (program,) = FINAL.only("ENTRYPOINT").words
    assert program == "paceline" == next(iter(PROJECT["project"]["scripts"]))
    accepted(FINAL.only("CMD").words)
    check = FINAL.only("HEALTHCHECK")
    assert check.words[0] == program
    accepted(check.words[1:])
    assert {flag.partition("=")[0] for flag in check.flags} >= {"--interval", "--timeout", "--start-period"}


def test_exposed_ports_are_the_defaults() -> None:
    serve = all_commands()["serve"]
    with click.Context(serve) as context:
        defaults = {each.name: each.get_default(context) for each in serve.params}
    assert list(map(int, FINAL.only("EXPOSE").words)) == [defaults["grpc_port"], defaults["metrics_port"]]


def test_labels_describe_the_image() -> None:
    labels = FINAL.pairs("LABEL")
    assert labels.keys() == {f"org.opencontainers.image.{name}" for name in LABELS}
    assert labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]
    assert FINAL.pairs("ARG")["VERSION"] == PROJECT["project"]["version"]


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_lock_of_each_variant_has_the_dependencies_in_the_tested_versions(variant: str) -> None:
    lock, tested = locked(FOLDER / f"{variant}.lock"), locked(REPO / "requirements.lock")
    needed = {Requirement(line).name for line in PROJECT["project"]["dependencies"]} - {"onnxruntime-gpu"}
    assert needed <= lock.keys(), "run make lock"
    assert {name: lock[name] for name in lock.keys() & tested} == {name: tested[name] for name in lock.keys() & tested}


def test_lock_of_cpu_has_only_the_small_runtime_and_that_of_cuda_the_libraries() -> None:
    cpu, cuda = locked(FOLDER / "cpu.lock"), locked(FOLDER / "cuda.lock")
    assert "onnxruntime-gpu" not in cpu
    assert "onnxruntime" in cpu
    assert not any(name.startswith("nvidia-") for name in cpu)
    assert {"onnxruntime-gpu", "nvidia-cublas"} <= cuda.keys()
    assert any(name.startswith("nvidia-cudnn") for name in cuda)


def test_locks_for_bulk_add_its_extra_to_the_others() -> None:
    wanted = (FOLDER / "bulk.in").read_text().splitlines()[1:]
    assert wanted == PROJECT["project"]["optional-dependencies"]["bulk"]
    lock, tested = locked(FOLDER / "bulk.lock"), locked(REPO / "requirements.lock")
    assert {Requirement(line).name for line in wanted} <= lock.keys(), "run make lock"
    assert lock == {name: tested[name] for name in lock}
    for variant in ("cpu", "cuda"):
        assert (FOLDER / f"{variant}-bulk.lock").read_text() == f"-r {variant}.lock\n-r bulk.lock\n"
        assert not locked(FOLDER / f"{variant}.lock").keys() & lock.keys()


def test_lock_of_the_build_has_the_build_backend() -> None:
    (backend,) = (Requirement(line).name for line in PROJECT["build-system"]["requires"])
    assert backend in locked(FOLDER / "build.lock")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a AS b\nRUN x \\\n  --y", [("RUN", (), "x    --y")]),
        ("FROM a\n# no\nCOPY --from=b /c /d", [("COPY", ("--from=b",), "/c /d")]),
        ('FROM a\nHEALTHCHECK --timeout=1s CMD ["p"]', [("HEALTHCHECK", ("--timeout=1s",), '["p"]')]),
    ],
)
def test_stages_parses_instructions(text: str, expected: list[tuple[str, tuple[str, ...], str]]) -> None:
    stage: Stage = stages(text)[1]
    assert [(each.keyword, each.flags, each.text) for each in stage.instructions] == expected
