"""The example of docs/guides/sklearn-text.md, trained and served as the guide says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.clients import InferenceClient
from tests.examples import PYTHON, answers, check_guide, executions, trained
from tests.harness import ServerProcess


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = trained("routing", "routing/1/pipeline.joblib", tmp_path_factory.mktemp("routing"))
    with ServerProcess(repository, args=PYTHON) as server:
        yield server


async def test_messages_go_to_their_departments_in_batches(routing: ServerProcess) -> None:
    messages = {
        "The courier has lost my package": "shipping",
        "You have charged my card twice": "billing",
        "After the update the app crashes": "technical",
    }
    texts = [*messages] * 16
    found = await answers(routing, "routing", [{"text": [[text]]} for text in texts])
    assert [one["department"][0, 0].decode() for one in found] == [messages[text] for text in texts]
    assert all(1 / 3 < one["probability"][0, 0] <= 1 for one in found)
    assert executions(routing, "routing") < len(texts)


def test_text_that_is_no_utf8_is_answered(routing: ServerProcess) -> None:
    with InferenceClient(routing.target) as client:
        assert client.infer("routing", {"text": [[b"my \xff parcel"]]})["department"].shape == (1, 1)


@pytest.mark.parametrize(
    "path",
    [
        "routing/models/routing/1/model.py",
        "routing/models/routing/config.pbtxt",
    ],
)
def test_guide_shows_files_of_the_example_unchanged(path: str) -> None:
    check_guide("sklearn-text.md", path)
