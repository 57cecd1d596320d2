"""`paceline bulk` over real data: short forms of `make demo-bulk`, which compares every row with ONNX Runtime's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.embedding import bulk as embedding
from examples.embedding.build import missing
from examples.magika import bulk as magika
from tests.harness import REPO
from tests.lengths import LONG

TEXTS = 48


def test_types_of_files_are_onnx_runtimes_own(tmp_path: Path) -> None:
    found_paths = [path for folder in ("docs", "protos") for path in magika.all_files(REPO / folder)]
    paths = [path for path in found_paths if "__pycache__" not in path.parts]
    short = tmp_path / "empty"
    short.touch()
    said = magika.compare([*paths, short], tmp_path / "work")
    found = re.fullmatch(r"(\d+) files, (\d+) too short: all scores are those of ONNX Runtime alone", said)
    assert found is not None
    assert int(found[1]) == len(paths) + 1 > 50
    assert int(found[2]) >= 1


@pytest.mark.timeout(400)
@pytest.mark.skipif(not LONG, reason="its trial takes ten seconds, and the suite serves it: make proofs")
def test_embeddings_of_documentation_are_onnx_runtimes_own(tmp_path: Path) -> None:
    if wanted := missing():
        pytest.skip(f"make witness has not downloaded {', '.join(wanted)}")
    texts = embedding.corpus([REPO / "docs"], TEXTS)
    assert len(texts) == TEXTS
    assert embedding.compare(texts, tmp_path).startswith(f"{TEXTS} texts: all embeddings are those of ONNX Runtime")
