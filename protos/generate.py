"""Regenerates the modules made from the .proto files: `python -m paceline.protos.generate`; `--check` only compares.

Lives here: running protoc and rewriting its output. Must not live here: anything that runs in production; the
generator needs grpcio-tools, the generated modules do not.

Rule: the text of every rewrite occurs once in protoc's output, and any other number is an error. So a new protoc cannot
quietly give us modules that register in protobuf's default pool (see protos/pool.py).

The version of grpcio-tools is pinned because it sets the oldest grpcio and protobuf that can import the result:
1.76.0 makes code for grpcio >= 1.76.0 and protobuf >= 6.31.1, 7 included.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOOLS_VERSION: Final = "1.76.0"
PROTOS_DIR: Final = Path(__file__).resolve().parent
MODULES: Final = ("inference", "model_config")
COMMAND: Final = "python -m paceline.protos.generate"
_HEADER: Final = f"""\
# Made from the .proto files by `{COMMAND}`; do not edit.
# ruff: noqa
# mypy: ignore-errors
# fmt: off
"""


class GenerateError(Exception):
    """protoc failed, or its output is not what the rewriting expects; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Replaces `old` by `new` in a generated file, where `old` has to occur exactly once."""

    old: str
    new: str


_DEFAULT_POOL: Final = (
    Rewrite(
        "from google.protobuf import descriptor_pool as _descriptor_pool\n",
        "from paceline.protos import pool as _pool\n",
    ),
    Rewrite("from google.protobuf import symbol_database as _symbol_database\n", ""),
    Rewrite("_sym_db = _symbol_database.Default()\n", ""),
    Rewrite("_descriptor_pool.Default().AddSerializedFile(", "_pool.POOL.AddSerializedFile("),
)


def _builder(module: str) -> Rewrite:
    return Rewrite(
        f"_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, '{module}_pb2', _globals)",
        f"_pool.build_module(DESCRIPTOR, 'paceline.protos.{module}_pb2', _globals)",
    )


def _absolute_import(statement: str) -> Rewrite:
    return Rewrite(f"\n{statement}", f"\nfrom paceline.protos {statement}")


REWRITES: Final[Mapping[str, Sequence[Rewrite]]] = {
    "inference_pb2.py": (
        *_DEFAULT_POOL,
        _builder("inference"),
        _absolute_import("import model_config_pb2 as model__config__pb2\n"),
    ),
    "inference_pb2.pyi": (Rewrite("import model_config_pb2 as", "from paceline.protos import model_config_pb2 as"),),
    "inference_pb2_grpc.py": (_absolute_import("import inference_pb2 as inference__pb2\n"),),
    "model_config_pb2.py": (*_DEFAULT_POOL, _builder("model_config")),
    "model_config_pb2.pyi": (),
}
"""The generated files that are kept, and what is changed in each. model_config_pb2_grpc.py is not kept: no service."""

_LEFTOVERS: Final = ("_descriptor_pool", "_sym_db", "_symbol_database", "BuildTopDescriptorsAndMessages")


def rewrite(name: str, text: str) -> str:
    """Returns protoc's `text` for the file `name`, moved to our pool and package.

    Raises GenerateError when an expected text does not occur exactly once, or something of the default pool is left.
    """
    for step in REWRITES[name]:
        found = text.count(step.old)
        if found != 1:
            raise GenerateError(
                f"{name}: expected 1 of {step.old!r} in protoc's output, got {found}; "
                "adapt REWRITES in protos/generate.py to what this protoc writes"
            )
        text = text.replace(step.old, step.new)
    for word in _LEFTOVERS:
        if word in text:
            raise GenerateError(f"{name}: {word!r} is left after rewriting; adapt REWRITES in protos/generate.py")
    return _HEADER + text


def generate(proto_dir: Path = PROTOS_DIR) -> dict[str, str]:
    """Returns the text of every generated file by its name; writes nothing but a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        _run_protoc(proto_dir, Path(folder))
        return {name: rewrite(name, _read(Path(folder) / name) or "") for name in REWRITES}


def _run_protoc(proto_dir: Path, output_dir: Path) -> None:
    require_tools(_tools_version())
    from grpc_tools import protoc  # type: ignore[import-untyped]  # here, since only development installs have it

    outputs = [f"--{kind}_out={output_dir}" for kind in ("python", "pyi", "grpc_python")]
    sources = [str(proto_dir / f"{module}.proto") for module in MODULES]
    status = protoc.main(["protoc", f"-I{proto_dir}", *outputs, *sources])
    if status != 0:
        raise GenerateError(f"protoc: expected exit status 0, got {status}; its complaint is above")


def require_tools(installed: str) -> None:
    """Raises GenerateError unless `installed` is the pinned version of grpcio-tools."""
    if installed != TOOLS_VERSION:
        raise GenerateError(f"grpcio-tools: expected {TOOLS_VERSION}, got {installed}; install the pinned one")


def _tools_version() -> str:
    try:
        return importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def compare(expected: Mapping[str, str], folder: Path = PROTOS_DIR) -> list[str]:
    """Returns the lines of a unified diff from the files in `folder` to `expected`; empty when they agree.

    A generated file that should not be there counts as a difference.
    """
    names = sorted({*expected, *(path.name for path in folder.glob("*_pb2*.py*") if path.is_file())})
    lines: list[str] = []
    for name in names:
        lines += _diff(name, _read(folder / name), expected.get(name))
    return lines


def _diff(name: str, present: str | None, expected: str | None) -> list[str]:
    if present is None:
        return [f"{name}: missing"]
    if expected is None:
        return [f"{name}: not made from any .proto file"]
    before, after = present.splitlines(), expected.splitlines()
    return list(difflib.unified_diff(before, after, f"{name} (present)", f"{name} (expected)", lineterm=""))


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the generated files, or compares them with `--check`; returns the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Regenerate the modules made from the .proto files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and show a diff when files differ")
    check: bool = parser.parse_args(arguments).check
    try:
        files = generate()
    except GenerateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return _check(files) if check else _write(files)


def _check(files: Mapping[str, str]) -> int:
    difference = compare(files)
    if not difference:
        return 0
    print("\n".join(difference))
    print(f"error: the generated files in protos/ are not what the .proto files give; run `{COMMAND}`", file=sys.stderr)
    return 1


def _write(files: Mapping[str, str]) -> int:
    for name, text in files.items():
        (PROTOS_DIR / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
