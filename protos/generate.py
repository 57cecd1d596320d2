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
import importlib.metadata
import sys
import tempfile
from collections.abc import Mapping, Sequence
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


def _default_pool(module: str) -> Sequence[tuple[str, str]]:
    """What takes a generated module out of protobuf's default pool."""
    return (
        (
            "from google.protobuf import descriptor_pool as _descriptor_pool\n",
            "from paceline.protos import pool as _pool\n",
        ),
        ("from google.protobuf import symbol_database as _symbol_database\n", ""),
        ("_sym_db = _symbol_database.Default()\n", ""),
        ("_descriptor_pool.Default().AddSerializedFile(", "_pool.POOL.AddSerializedFile("),
        (
            f"_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, '{module}_pb2', _globals)",
            f"_pool.build_module(DESCRIPTOR, 'paceline.protos.{module}_pb2', _globals)",
        ),
    )


_INFERENCE: Final = ("import inference_pb2 as", "from paceline.protos import inference_pb2 as")
_MODEL_CONFIG: Final = ("import model_config_pb2 as", "from paceline.protos import model_config_pb2 as")

REWRITES: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "inference_pb2.py": (*_default_pool("inference"), _MODEL_CONFIG),
    "inference_pb2.pyi": (_MODEL_CONFIG,),
    "inference_pb2_grpc.py": (_INFERENCE,),
    "model_config_pb2.py": _default_pool("model_config"),
    "model_config_pb2.pyi": (),
}
"""The generated files that are kept, and the texts that are replaced in each, every one of which has to occur exactly
once. model_config_pb2_grpc.py is not kept: no service."""

_LEFTOVERS: Final = ("_descriptor_pool", "_sym_db", "_symbol_database", "BuildTopDescriptorsAndMessages")


def rewrite(name: str, text: str) -> str:
    """Returns protoc's `text` for the file `name`, moved to our pool and package.

    Raises GenerateError when an expected text does not occur exactly once, or something of the default pool is left.
    """
    for old, new in REWRITES[name]:
        found = text.count(old)
        if found != 1:
            raise GenerateError(
                f"{name}: expected 1 of {old!r} in protoc's output, got {found}; "
                "adapt REWRITES in protos/generate.py to what this protoc writes"
            )
        text = text.replace(old, new)
    for word in _LEFTOVERS:
        if word in text:
            raise GenerateError(f"{name}: {word!r} is left after rewriting; adapt REWRITES in protos/generate.py")
    return _HEADER + text


def generate(proto_dir: Path = PROTOS_DIR) -> dict[str, str]:
    """Returns the text of every generated file by its name; writes nothing but a temporary folder."""
    try:
        require_tools(importlib.metadata.version("grpcio-tools"))
    except importlib.metadata.PackageNotFoundError:
        require_tools("none")
    from grpc_tools import protoc  # type: ignore[import-untyped]  # here, since only development installs have it

    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        sources = [str(proto_dir / f"{module}.proto") for module in MODULES]
        status = protoc.main(["protoc", f"-I{proto_dir}", *outputs, *sources])
        if status != 0:
            raise GenerateError(f"protoc: expected exit status 0, got {status}; its complaint is above")
        return {name: rewrite(name, (Path(folder) / name).read_text("utf-8")) for name in REWRITES}


def require_tools(installed: str) -> None:
    """Raises GenerateError unless `installed` is the pinned version of grpcio-tools."""
    if installed != TOOLS_VERSION:
        raise GenerateError(f"grpcio-tools: expected {TOOLS_VERSION}, got {installed}; install the pinned one")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the generated files, or compares them with `--check`; returns the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Regenerate the modules made from the .proto files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the files that differ")
    check: bool = parser.parse_args(arguments).check
    try:
        files = generate()
    except GenerateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    present = {path.name: path.read_text("utf-8") for path in PROTOS_DIR.glob("*_pb2*.py*") if path.is_file()}
    others = sorted(name for name in {*files, *present} if files.get(name) != present.get(name))
    if check and others:
        expected = f"run `{COMMAND}`, and delete what it doesn't make"
        print(f"error: not what the .proto files give: {', '.join(others)}; {expected}", file=sys.stderr)
        return 1
    for name in files if not check else ():
        (PROTOS_DIR / name).write_text(files[name], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
