"""Which models the batcher serves in front of another server, as they appear, change and disappear there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from paceline.server.limits import Limits
from tests.integration.probing import probe
from tests.integration.scripted import request
from tests.integration.serving import failure_of
from tests.integration.upstreams import Upstream, behind, proxying, tensors_of, upstream
from tests.polling import eventually_async

Code = grpc.StatusCode
NAMED = {"models": ("m",)}
READY_M = pb.RepositoryIndexResponse.ModelIndex(name="m", state="READY")


async def test_upstream_without_an_index_needs_its_models_named(tmp_path: Path) -> None:
    stub = Upstream()
    async with upstream(stub) as target, proxying(tmp_path, target) as served:
        assert not served.server.repository.ready
        way_out = "name its models with --upstream-model"
        assert way_out in served.server.repository.waits_for
        code, text = await failure_of(served.infer(request(1)))
        assert (code, way_out in text) == (Code.UNAVAILABLE, True)


async def test_restricted_index_is_reported_with_helpful_flag(tmp_path: Path) -> None:
    """PyTriton's is, by default."""

    class Restricted(Upstream):
        async def RepositoryIndex(self, call: Any, context: Any) -> pb.RepositoryIndexResponse:
            await context.abort(Code.UNAVAILABLE, "This protocol is restricted, expecting header 'token'")
            raise AssertionError

    stub = Restricted()
    async with upstream(stub) as target:
        async with proxying(tmp_path, target) as served:
            assert not served.server.repository.ready
            assert "protocol is restricted" in served.server.repository.waits_for
            assert "--upstream-model" in served.server.repository.waits_for
        async with proxying(tmp_path, target, **NAMED) as served:
            assert tensors_of(await served.infer(request(1)))["x"][0, 0] == 2


@pytest.mark.parametrize("state", ["READY", "State.READY"])  # the latter is MLServer's
async def test_models_follow_the_upstreams_index(tmp_path: Path, state: str) -> None:
    stub = Upstream()
    line = pb.RepositoryIndexResponse.ModelIndex
    stub.index = [
        line(name="m", version="3", state=state),
        line(name="other", state="UNAVAILABLE"),
        line(name="never"),
    ]
    async with upstream(stub) as target, proxying(tmp_path, target) as served:
        told = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
        assert (list(told.versions), told.platform, list(told.inputs[0].shape)) == (["3"], "stub", [-1, 2])
        assert (await served.infer(request(1))).model_version == "3"
        assert stub.calls[0].model_version == "3"
        assert (await failure_of(served.infer(request(1, model="other"))))[0] is Code.NOT_FOUND
        stub.outputs = {"y": ("FP32", [-1, 2])}
        changed = lambda: len(served.server.repository.get("m", "").spec.outputs) == 1  # noqa: E731
        await eventually_async(changed, "the changed model")
        assert list(tensors_of(await served.infer(request(1)))) == ["y"]
        stub.index = []
        await eventually_async(lambda: not served.server.repository.models, "no model")
        assert (await failure_of(served.infer(request(1))))[0] is Code.NOT_FOUND


async def test_unready_model_removed_is_not_waited_for(tmp_path: Path) -> None:
    stub = Upstream()
    stub.index = [pb.RepositoryIndexResponse.ModelIndex(name=name, state="READY") for name in ("m", "going")]
    async with upstream(stub) as target, proxying(tmp_path, target) as served:
        # The stub's ModelReady knows only `m`, as if `going` were being unloaded.
        assert list(served.server.repository.failures) == ["going"]
        stub.index = stub.index[:1]
        await eventually_async(lambda: served.server.repository.ready, "readiness")
        assert (await failure_of(served.infer(request(1, model="going"))))[0] is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("versions", "asked", "sent"),
    [
        ((), "", ""),
        (("v1.0",), "", "v1.0"),
        (("2", "10"), "", "10"),
        (("v1.0",), "v1.0", "v1.0"),
        (("2", "10"), "2", "2"),
    ],
)
async def test_versions_are_the_upstreams_whether_numbers_or_not(
    tmp_path: Path, versions: tuple[str, ...], asked: str, sent: str
) -> None:
    stub = Upstream()
    stub.versions = versions
    async with behind(tmp_path, stub) as served:
        one = request(1)
        one.model_version = asked
        assert (await served.infer(one)).model_version == sent
        assert stub.calls[0].model_version == sent
        told = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
        assert list(told.versions) == list(versions)
        index = await served.stub.RepositoryIndex(pb.RepositoryIndexRequest())
        assert [line.version for line in index.models] == (list(versions) or [""])
        statistics = await served.stub.ModelStatistics(pb.ModelStatisticsRequest())
        assert sum(one.inference_count for one in statistics.model_stats) == 1


async def test_models_are_asked_again_after_unavailable_call(tmp_path: Path) -> None:
    stub = Upstream()
    async with behind(tmp_path, stub, health_secs=60) as served:
        stub.inputs = {"a": ("FP32", [-1, 3])}
        stub.outputs = {"x": ("FP32", [-1, 3])}
        stub.abort = lambda call: (Code.UNAVAILABLE, "as if it had ended, and come back at once as another")
        assert (await failure_of(served.infer(request(1))))[0] is Code.UNAVAILABLE
        stub.abort = lambda call: None
        changed = lambda: served.server.repository.get("m", "").spec.inputs[0].dims == (3,)  # noqa: E731
        await eventually_async(changed, "the other model")
        assert tensors_of(await served.infer(request(1, columns=3)))["x"][0, 0] == 2


class UpstreamWithModels(Upstream):
    """An upstream whose index has the given models, all of them ready or none."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.has(*names)

    def has(self, *names: str) -> None:
        self.index = [pb.RepositoryIndexResponse.ModelIndex(name=name, state="READY") for name in names]

    async def ModelReady(self, call: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self.model_ready)


async def test_hanging_readiness_check_holds_up_no_others(tmp_path: Path) -> None:
    silent, answer = asyncio.Event(), asyncio.Event()

    class HangingReadyCheck(UpstreamWithModels):
        async def ModelReady(self, call: Any, context: Any) -> pb.ModelReadyResponse:
            if call.name == "silent":
                silent.set()
                try:
                    await answer.wait()
                finally:  # also when the caller has given up
                    silent.clear()
            return await super().ModelReady(call, context)

    stub = HangingReadyCheck("m")
    async with upstream(stub) as target, proxying(tmp_path, target) as served:
        stub.has("m", "silent", "n")
        await eventually_async(lambda: served.server.repository.find("n", ""), "the one behind it")
        assert silent.is_set()
        assert tensors_of(await served.infer(request(1, model="n")))["x"][0, 0] == 2
        answer.set()
        await eventually_async(lambda: served.server.repository.find("silent", ""), "the silent one")


async def test_model_beyond_max_models_waits_for_removal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stub = UpstreamWithModels("m", "n")
    settings = Settings(paths=(), limits=Limits(models=1))
    async with upstream(stub) as target, proxying(tmp_path, target, settings=settings) as served:
        # The served one is whichever answered first.
        other = "n" if served.server.repository.find("m", "") else "m"
        code, text = await failure_of(served.infer(request(1, model=other)))
        assert (code, "as many as --max-models allows" in text) == (Code.UNAVAILABLE, True)
        refused = served.server.repository.refused_loads
        await eventually_async(lambda: served.server.repository.refused_loads > refused + 1, "it is tried again")
        assert len([line for line in caplog.messages if "--max-models" in line]) == 1
        stub.has(other)
        await eventually_async(lambda: served.server.repository.find(other, ""), "the other one")
        assert tensors_of(await served.infer(request(1, model=other)))["x"][0, 0] == 2


async def test_probe_gives_reasons_of_five_models(tmp_path: Path) -> None:
    stub = UpstreamWithModels(*(f"m{number}" for number in range(8)))
    stub.model_ready = False
    async with upstream(stub) as target, proxying(tmp_path, target) as served:
        why = f"upstream {target}: the model is not ready"
        told = "; ".join(f"model 'm{number}': {why}" for number in range(5))
        assert await probe(served, "/readyz") == (503, f"{told}; and 3 more\n")


async def test_version_of_thousands_of_digits_is_served(tmp_path: Path) -> None:
    stub = Upstream()
    stub.versions = ("1" * 5000,)  # int() refuses so many
    async with behind(tmp_path, stub) as served:
        assert (await served.infer(request(1))).model_version == "1" * 5000


async def test_unsupported_model_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    stub = Upstream()
    stub.inputs = {"a": ("COMPLEX", [-1])}
    async with behind(tmp_path, stub) as served:
        code, text = await failure_of(served.infer(request(1)))
        assert code is Code.UNAVAILABLE
        assert "input 'a' of the upstream" in text
        stub.inputs = {"a": ("FP32", [-1, 2])}
        await eventually_async(lambda: served.server.repository.ready, "ready")
