"""The code of docs/guides/python-client.md, run against a server; only the address is replaced."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np

from backends.memory import MemoryModel
from backends.spec import ModelSpec, TensorSpec
from tests.harness import REPO
from tests.integration.serving import Served, serving

GUIDE = (REPO / "docs" / "guides" / "python-client.md").read_text(encoding="utf-8")


def blocks(served: Served) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    return [one.replace("127.0.0.1:8001", served.target) for one in found]


async def test_code_of_the_guide_runs(tmp_path: Path) -> None:
    spec = ModelSpec((TensorSpec("bytes", "INT32", (-1, 2048)),), (TensorSpec("target_label", "INT32", (-1, 2048)),))
    printed: list[tuple[Any, ...]] = []
    names: dict[str, Any] = {"print": lambda *words: printed.append(words)}
    async with serving(tmp_path, {"magika": MemoryModel(spec)}, config="max_batch_size: 8") as served:
        for block in blocks(served):
            await asyncio.to_thread(exec, block, names)
        answer = await asyncio.to_thread(names["client"].infer, "magika", {"bytes": np.zeros((2, 2048), np.int32)})
        assert answer["target_label"].shape == (2, 2048)
        names["client"].close()
    (inputs,), (label, outputs) = printed
    assert [(one.name, one.datatype) for one in inputs] == [("bytes", "INT32")]
    assert (label.shape, outputs) == ((1, 2048), ["target_label"])


def test_guide_names_all_methods_and_errors_of_the_client() -> None:
    from clients import InferenceClient, errors

    methods = {name for name in vars(InferenceClient) if not name.startswith("_")} - {"close"}
    assert {name for name in methods if f"`{name}(" not in GUIDE} == set()
    assert {name for name in errors.__all__ if name[0].isupper() and f"`{name}`" not in GUIDE} == set()
