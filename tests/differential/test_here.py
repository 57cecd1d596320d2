"""This server answers as the lists of calls expect, and its documentation says where Triton answers differently. None
of this needs Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.protos import inference_pb2 as pb
from tests.differential.calls import CALLS, HARMFUL
from tests.differential.comparing import Call, answer_of, faults_here
from tests.differential.pair import One, serving_here, shared_objects
from tests.differential.scenes import SCENES
from tests.harness import REPO


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[One]:
    with shared_objects(), serving_here(tmp_path_factory.mktemp("here")) as serving:
        yield serving


def without_process(call: Call) -> Call:
    """A load with a configuration alone: on the identity backend if that can have such inputs and outputs, as nothing
    of it depends on a Python model's process."""
    request = call.request
    if not isinstance(request, pb.RepositoryModelLoadRequest) or [*request.parameters] != ["config"]:
        return call
    config = request.parameters["config"].string_param
    if any(f'"{word}"' in config for word in ("allowRaggedBatch", "decoupled")) or config.count('"TYPE_') % 2:
        return call
    loaded = pb.RepositoryModelLoadRequest()
    loaded.CopyFrom(request)
    if config:
        loaded.parameters["config"].string_param = config.replace('"backend": "python"', '"backend": "identity"')
    return replace(call, request=loaded)


# In the order of the list: some calls change what later ones see.
@pytest.mark.parametrize("call", [*HARMFUL, *CALLS], ids=lambda call: f"{call.rpc}: {call.what}")
def test_call_is_answered_as_expected(call: Call, here: One) -> None:
    found = faults_here(call, answer_of(here.channel, without_process(call)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("row", sorted({one.row for one in (*CALLS, *HARMFUL, *SCENES) if one.row}))
def test_difference_has_a_row_in_the_table_of_deviations(row: str) -> None:
    table = (
        (REPO / "docs" / "protocol.md").read_text(encoding="utf-8").partition("## Where this differs from Triton")[2]
    )
    assert sum(line.startswith(f"| {row}") for line in table.splitlines()) == 1


def test_difference_always_names_its_row() -> None:
    assert not [call.what for call in (*CALLS, *HARMFUL) if call.here and not call.row]
    assert not [scene.what for scene in SCENES if (scene.here is not None or scene.counts_here) and not scene.row]
