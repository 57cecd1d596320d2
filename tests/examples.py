"""What tests of the examples in docs/guides share: their repositories, completed, and many requests at once."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.clients import AsyncInferenceClient
from tests.harness import REPO, ServerProcess

__all__ = ["EXAMPLES", "PYTHON", "answers", "check_guide", "executions", "trained"]

EXAMPLES = REPO / "examples"
PYTHON = ("--allow-python-models", "true")


def trained(example: str, file: str, folder: Path) -> Path:
    """A copy of the example's repository, with what its `train.py` makes."""
    shutil.copytree(EXAMPLES / example / "models", folder, dirs_exist_ok=True)
    subprocess.run([sys.executable, EXAMPLES / example / "train.py", folder / file], check=True, timeout=100)
    return folder


def executions(server: ServerProcess, model: str) -> float:
    return server.metrics()[f'nv_inference_exec_count{{model="{model}",version="1"}}']


async def answers(server: ServerProcess, model: str, inputs: Sequence[dict[str, list[list[object]]]]) -> list[Any]:
    """The answers to all requests at the same time, or their errors."""
    async with AsyncInferenceClient(server.target) as client:
        calls = (client.infer(model, one) for one in inputs)
        return list(await asyncio.gather(*calls, return_exceptions=True))


def check_guide(guide: str, path: str) -> None:
    """The guide shows the file of an example unchanged, as a block of its own."""
    shown = (REPO / "docs" / "guides" / guide).read_text(encoding="utf-8")
    assert f"\n{(EXAMPLES / path).read_text(encoding='utf-8')}```" in shown
