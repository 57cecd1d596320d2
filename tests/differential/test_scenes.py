"""Models that run what their requests say: the same answers and counts on both servers, or as documented."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.differential.pair import Both, One, serving_both
from tests.differential.scenes import MODELS, SCENES, Counted, Scene, Told
from tests.polling import eventually


@pytest.fixture(scope="module")
def puppets(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with serving_both(tmp_path_factory.mktemp("puppets"), MODELS) as serving:
        yield serving


def told(message: pb.ModelStreamInferResponse) -> Told:
    response = message.infer_response
    # Triton says of an error before the model nothing but that.
    last = response.parameters["triton_final_response"].bool_param or not response.model_name
    if message.error_message:
        return "error", last
    return (int(np.frombuffer(response.raw_output_contents[0], "<i8")[0]) if response.outputs else None), last


def answers(one: One, requests: Sequence[pb.ModelInferRequest]) -> list[Told]:
    """All answers, those of each request together."""
    stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
    messages = list(stub.ModelStreamInfer(iter(requests), timeout=30))
    return [told(message) for message in sorted(messages, key=lambda message: message.infer_response.id)]


def counted(one: One, model: str) -> Counted:
    stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
    (found,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name=model), timeout=20).model_stats
    times = found.inference_stats
    return times.success.count, times.fail.count, found.inference_count, found.execution_count


def differences(one: One, before: Mapping[str, Counted], expected: Mapping[str, Counted]) -> dict[str, Counted]:
    """What has been counted of each model that isn't as expected."""
    found = {}
    for model, then in before.items():
        success, failed, rows, executions = (now - was for now, was in zip(counted(one, model), then, strict=True))
        found[model] = success, failed, rows, executions
    return {model: counts for model, counts in found.items() if counts != expected[model]}


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.what)
@pytest.mark.parametrize("who", ["triton", "here"])
def test_scene_is_answered_and_counted_as_expected(scene: Scene, who: str, puppets: Both) -> None:
    one: One = getattr(puppets, who)
    differs = who == "here"
    counts = {**scene.counts, **scene.counts_here} if differs else scene.counts
    before = {model: counted(one, model) for model in counts}
    assert answers(one, scene.requests) == (scene.here if differs and scene.here is not None else scene.triton)
    # Triton counts a moment after it has answered.
    eventually(lambda: not differences(one, before, counts), f"{counts}, got {differences(one, before, counts)}", 5)
