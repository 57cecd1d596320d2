"""The example of docs/guides/python-models.md, trained and served as the guide says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fault.traffic import connected
from tests.harness import REPO, ServerProcess
from tests.wire import infer

EXAMPLE = REPO / "examples" / "python-model"
GUIDE = REPO / "docs" / "guides" / "python-models.md"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The example's repository, with a trained classifier."""
    shutil.copytree(EXAMPLE / "models", tmp_path / "models")
    folder = tmp_path / "models" / "flowers" / "1"
    subprocess.run([sys.executable, str(EXAMPLE / "train.py"), str(folder)], check=True, timeout=60)
    return tmp_path / "models"


def test_example_gives_many_concurrent_requests_the_classifiers_answers(repository: Path) -> None:
    random = np.random.default_rng(7)
    measurements = random.uniform(0, 8, (200, 4)).astype(np.float32)
    stored = np.load(repository / "flowers" / "1" / "classifier.npz")
    expected = stored["species"][(measurements @ stored["weights"] + stored["bias"]).argmax(axis=1)]
    with ServerProcess(repository, args=["--allow-python-models", "true"]) as server, connected(server) as client:
        calls = [client.send(infer("flowers", {"measurements": row[None]})) for row in measurements]
        answers = [call.result() for call in calls]
        assert [answer.raw_output_contents[0][4:].decode() for answer in answers] == expected.tolist()
        for answer in answers:
            np.testing.assert_allclose(np.frombuffer(answer.raw_output_contents[1], np.float32).sum(), 1, rtol=1e-5)
        executions = server.metrics()['nv_inference_exec_count{model="flowers",version="1"}']
        assert 1 <= executions < len(calls), "requests shared batches"


@pytest.mark.parametrize("path", ["models/flowers/1/model.py", "models/flowers/config.pbtxt"])
def test_guide_shows_the_files_of_the_example_unchanged(path: str) -> None:
    shown = GUIDE.read_text(encoding="utf-8")
    for paragraph in (EXAMPLE / path).read_text(encoding="utf-8").strip().split("\n\n"):
        assert paragraph in shown
