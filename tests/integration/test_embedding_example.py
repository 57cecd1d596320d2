"""The example of docs/guides/embeddings.md, completed and served as the guide says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from examples.embedding import build, pooling
from examples.embedding.demo import LEAST_LIKENESS, SENTENCES, embed
from examples.embedding.directly import embedded
from paceline.clients import InferenceClient
from tests.examples import EXAMPLES, PYTHON, check_guide, executions
from tests.harness import ServerProcess

TEXTS = 24


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess]]:
    if wanted := build.missing():
        pytest.skip(f"make witness has not downloaded {', '.join(wanted)}")
    repository = build.build(tmp_path_factory.mktemp("embedding"))
    with ServerProcess(repository, args=PYTHON) as server:
        yield repository, server


async def test_embeddings_are_those_of_the_files_alone(embedding: tuple[Path, ServerProcess]) -> None:
    repository, server = embedding
    texts = SENTENCES.read_text(encoding="utf-8").splitlines()[:TEXTS]
    for rounds in range(1, 11):
        vectors = await embed(server.grpc_port, texts, lambda done: None)
        # On a busy machine, they may come so far apart that each is executed by itself.
        if executions(server, "encoder") < rounds * TEXTS:
            break
    else:
        pytest.fail("texts of different lengths never shared a batch")
    assert (vectors * embedded(repository, texts)).sum(axis=1).min() > LEAST_LIKENESS
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_texts_of_one_request_are_embedded_together(embedding: tuple[Path, ServerProcess]) -> None:
    _, server = embedding
    texts = ["Bread rises because yeast makes gas.", "Yeast.", "The ferry doesn't run in strong winds."]
    with InferenceClient(server.target) as client:
        vectors = client.infer("embedding", {"text": [[text] for text in texts]})["embedding"]
    assert vectors.shape == (3, 384)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]


def test_pooling_file_is_what_its_script_makes() -> None:
    assert onnx.load(EXAMPLES / "embedding" / "models" / "pooling" / "1" / "model.onnx") == pooling.model()


@pytest.mark.parametrize(
    "path",
    [
        "embedding/models/tokenizer/1/model.py",
        "embedding/models/tokenizer/config.pbtxt",
        "embedding/models/encoder/config.pbtxt",
        "embedding/models/pooling/config.pbtxt",
    ],
)
def test_guide_shows_files_of_the_example_unchanged(path: str) -> None:
    check_guide("embeddings.md", path)
