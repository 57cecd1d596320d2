"""A repository with a bad model: the others serve, and requests for the bad one are answered with the reason."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.backends.base import Device
from paceline.backends.errors import LoadError
from paceline.backends.spec import ModelSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests import models
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.memory_models import MemoryInstance, MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode
GOOD = infer("good", {"a": rows_of_floats(1)})


def corrupt(repository: Path) -> str:
    (repository / "bad" / "1").mkdir(parents=True)
    (repository / "bad" / "1" / "model.onnx").write_bytes(models.mlp().SerializeToString()[:100])
    return "onnx runtime error 7: "


def unsupported(repository: Path) -> str:
    write_model(repository, "bad", 'model_repository_agents { agents { name: "x" } }')
    return "model_repository_agents is not supported by this build"


def misspelt(repository: Path) -> str:
    write_model(repository, "bad", "\ndynamic_batchin { }")
    what = 'Message type "inference.ModelConfig" has no field named "dynamic_batchin". Did you mean dynamic_batching?'
    return f"{repository}/bad/config.pbtxt:2:1 : {what}"


def misnamed(repository: Path) -> str:
    write_model(repository, "bad", 'name: "worse"')
    return "name: expected 'bad', the name of its folder, got 'worse'"


def empty(repository: Path) -> str:
    (repository / "bad").mkdir()
    return f"no version to load: expected folders named by version numbers in {repository}/bad, found none"


async def check(served: Served, reason: str) -> None:
    assert (await served.infer(GOOD)).raw_output_contents[0] == GOOD.raw_input_contents[0]
    assert not (await served.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await served.stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await served.stub.ModelReady(pb.ModelReadyRequest(name="good"))).ready
    assert not (await served.stub.ModelReady(pb.ModelReadyRequest(name="bad"))).ready
    health = health_pb2_grpc.HealthStub(served.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    for call in (
        served.infer(infer("bad", {"a": rows_of_floats(1)})),
        served.infer(infer("bad", {"a": rows_of_floats(1)}, version="1")),
        served.stub.ModelMetadata(pb.ModelMetadataRequest(name="bad")),
    ):
        code, text = await failure_of(call)
        assert code is Code.UNAVAILABLE
        assert text.startswith("Request for unknown model: 'bad' is not ready: ")
        assert reason in text


@pytest.mark.parametrize("spoil", [corrupt, unsupported, misspelt, misnamed, empty])
async def test_bad_model_is_unavailable_with_the_reason_while_others_serve(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    reason = spoil(tmp_path)
    async with serving(tmp_path, {"good": echo_model()}) as served:
        await check(served, reason)


async def test_names_not_in_utf8_fail_only_their_models_and_the_index_lists_all(tmp_path: Path) -> None:
    for name in (b"r\xe9seau", b"weights"):
        (tmp_path / os.fsdecode(name) / "1").mkdir(parents=True)
    write_model(tmp_path, "good")
    for name in ("good", "weights"):
        (tmp_path / name / "1" / os.fsdecode(b"\xe9.bin")).touch()
    async with serving(tmp_path, {"good": echo_model()}) as served:
        assert (await served.infer(GOOD)).raw_output_contents[0] == GOOD.raw_input_contents[0]
        answer = await served.stub.RepositoryIndex(pb.RepositoryIndexRequest())
        good, named, weights = answer.models
        assert (good.name, good.state) == ("good", "READY")
        assert (named.name, named.state, named.reason) == (
            r"r\udce9seau",
            "UNAVAILABLE",
            r"expected a name in UTF-8, got 'r\udce9seau'",
        )
        assert (weights.name, weights.state, r"there is \udce9.bin" in weights.reason) == (
            "weights",
            "UNAVAILABLE",
            True,
        )


class FailingModel(MemoryModel):
    """A model whose second instance can't be made."""

    def __init__(self, spec: ModelSpec, error: Exception) -> None:
        super().__init__(spec)
        self._error = error

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        if self.open_instances:
            raise self._error
        return super().instance(spec, device)


class UnprintableError(LoadError):
    def __str__(self) -> str:
        raise KeyError("words")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LoadError("no more memory"), "no more memory"),
        (RuntimeError("never seen"), "RuntimeError: never seen"),
        (UnprintableError(), "UnprintableError"),
    ],
)
async def test_bad_model_raising_any_exception_is_unavailable_and_leaves_nothing_open(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    bad = FailingModel(echo_model().spec, error)
    write_model(tmp_path, "bad", "instance_group { count: 2 }")
    async with serving(tmp_path, {"good": echo_model(), "bad": bad}) as served:
        await check(served, reason)
    assert bad.closed
    assert bad.open_instances == 0


async def test_start_with_exit_on_error_closes_the_loaded_models_and_says_why(tmp_path: Path) -> None:
    good, reason = echo_model(), unsupported(tmp_path)
    settings = Settings(paths=(tmp_path,), exit_on_error=True)
    with pytest.raises(StartError) as caught:
        async with serving(tmp_path, {"good": good}, settings=settings):
            pass
    assert str(caught.value) == f"failed to load model 'bad': {reason}"
    assert good.closed
    assert good.open_instances == 0


class BlockingCloseModel(MemoryModel):
    """A model that isn't closed before `gate` is set."""

    def __init__(self) -> None:
        super().__init__(echo_model().spec)
        self.closing, self.gate = threading.Event(), threading.Event()

    def close(self) -> None:
        self.closing.set()
        self.gate.wait(60)
        super().close()


async def test_failed_start_waits_for_a_closing_model_no_longer_than_the_exit_timeout(tmp_path: Path) -> None:
    good, reason = BlockingCloseModel(), unsupported(tmp_path)
    settings = Settings(paths=(tmp_path,), exit_on_error=True, exit_timeout_secs=0)
    with pytest.raises(StartError, match=reason):
        async with serving(tmp_path, {"good": good}, settings=settings):
            pass
    assert not good.closed
    good.gate.set()
    await eventually_async(lambda: good.closed, "what was under way ended")


async def test_failed_start_says_why_although_it_is_cancelled_meanwhile(tmp_path: Path) -> None:
    good, reason = BlockingCloseModel(), unsupported(tmp_path)

    async def start() -> None:
        async with serving(tmp_path, {"good": good}, settings=Settings(paths=(tmp_path,), exit_on_error=True)):
            pass

    starting = asyncio.create_task(start())
    await eventually_async(good.closing.is_set, "a model that is being closed")
    starting.cancel()
    with pytest.raises(StartError, match=reason):
        await starting
    good.gate.set()
    await eventually_async(lambda: good.closed, "what was under way ended")


async def test_start_with_only_bad_models_fails_even_without_exit_on_error(tmp_path: Path) -> None:
    unsupported(tmp_path)
    with pytest.raises(StartError, match="failed to load model 'bad': model_repository_agents"):
        async with serving(tmp_path):
            pass


async def test_stop_closes_every_model(tmp_path: Path) -> None:
    models_in_memory = {name: echo_model() for name in ("a", "b", "c")}
    async with serving(tmp_path, models_in_memory, config="instance_group { count: 2 }") as served:
        assert [model.open_instances for model in models_in_memory.values()] == [2, 2, 2]
        assert (await served.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert [model.open_instances for model in models_in_memory.values()] == [0, 0, 0]
    assert all(model.closed for model in models_in_memory.values())
