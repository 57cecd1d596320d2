"""Which models a server starts with in mode `explicit`, what other modes refuse, the index, and readiness."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode, Settings
from paceline.server.errors import StartError
from tests.integration.controlling import (
    READY_M,
    WARMED_UP_CONFIG,
    answers,
    ask,
    explicit,
    index,
    load,
    load_request,
    loading,
    model_ready,
    ready,
    slow_model,
    unload,
)
from tests.integration.serving import echo_model, failure_of, serving, write_model

Code = grpc.StatusCode


async def test_explicit_mode_without_load_model_starts_with_nothing_and_is_ready(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path)) as served:
        assert await index(served) == [("m", "", "", "")]
        assert await index(served, ready=True) == []
        assert await ready(served)
        assert not await model_ready(served)
        assert await failure_of(served.infer(ask())) == (
            Code.NOT_FOUND,
            "Request for unknown model: 'm' has no available versions: it was never loaded",
        )


async def test_explicit_mode_with_load_model_starts_only_the_named_models(tmp_path: Path) -> None:
    models = {name: echo_model() for name in "abc"}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("c", "a", "c"))) as served:
        assert await index(served, ready=True) == [("a", "1", "READY", ""), ("c", "1", "READY", "")]
        assert await answers(served, "a")
        assert await ready(served)


async def test_explicit_mode_with_a_star_starts_all_models(tmp_path: Path) -> None:
    models = {name: echo_model() for name in "abc"}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("*",))) as served:
        assert [line[0] for line in await index(served, ready=True)] == ["a", "b", "c"]


async def test_explicit_mode_starts_on_an_empty_repository(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        assert await index(served) == []
        assert await ready(served)


async def test_load_model_naming_a_missing_model_leaves_the_server_unready_until_it_is_loaded(tmp_path: Path) -> None:
    models = {"m": echo_model()}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("n", "m"))) as served:
        assert await index(served) == [*READY_M, ("n", "", "UNAVAILABLE", f"no model of that name in {tmp_path}")]
        assert not await ready(served)
        write_model(tmp_path, "n")
        models["n"] = echo_model()
        await load(served, "n")
        assert await ready(served)
    with pytest.raises(StartError, match="failed to load model 'nn': no model of that name in"):
        async with serving(tmp_path, settings=explicit(tmp_path, load=("nn",), exit_on_error=True)):
            pass


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_load_and_unload_are_refused_in_other_modes_naming_the_required_flag(
    tmp_path: Path, mode: ControlMode
) -> None:
    settings = Settings(paths=(tmp_path,), model_control_mode=mode, repository_poll_secs=1e6)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        for call in (load(served, "m"), unload(served, "m")):
            code, text = await failure_of(call)
            assert code is Code.UNIMPLEMENTED
            assert text == (
                "explicit model load / unload is not allowed: expected a server with --model-control-mode explicit, "
                f"got one with {mode.value}"
            )
        assert await index(served) == READY_M
        assert await answers(served)
        metadata = await served.stub.ServerMetadata(pb.ServerMetadataRequest())
        assert not {"model_repository", "model_repository(unload_dependents)"} & set(metadata.extensions)


async def test_model_repository_extensions_are_advertised_in_explicit_mode(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        metadata = await served.stub.ServerMetadata(pb.ServerMetadataRequest())
        assert {"model_repository", "model_repository(unload_dependents)"} <= set(metadata.extensions)


async def test_requests_that_name_a_repository_are_unimplemented(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path)) as served:
        load_one = load_request("m")
        load_one.repository_name = "one"
        for call in (
            served.stub.RepositoryModelLoad(load_one),
            served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(repository_name="one", model_name="m")),
            served.stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="one")),
        ):
            assert await failure_of(call) == (
                Code.UNIMPLEMENTED,
                "'repository_name' specification is not supported: expected none, got 'one'",
            )


async def test_index_of_an_unreadable_repository_lists_the_known_models(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    async with serving(repository, {"m": echo_model()}, settings=explicit(repository, load=("m",))) as served:
        repository.rename(tmp_path / "elsewhere")
        assert await index(served) == READY_M
        code, text = await failure_of(load(served, "m"))
        assert (code, text.startswith("failed to load 'm', failed to poll from model repository: ")) == (
            Code.UNAVAILABLE,
            True,
        )
        assert await answers(served)
        assert await index(served) == READY_M


async def test_health_follows_loads_and_unloads(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=WARMED_UP_CONFIG, settings=explicit(tmp_path)) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        statuses = [(await watch.read()).status]
        task = await loading(served, model)
        statuses.append((await watch.read()).status)
        model.gate.open()
        await task
        statuses.append((await watch.read()).status)
        write_model(tmp_path, "bad", "no_such_field: 1")
        await failure_of(load(served, "bad"))
        statuses.append((await watch.read()).status)
        await unload(served, "bad")
        statuses.append((await watch.read()).status)
        watch.cancel()
    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert statuses == [serving_, not_serving, serving_, not_serving, serving_]


async def test_non_strict_readiness_ignores_failed_models(tmp_path: Path) -> None:
    write_model(tmp_path, "bad", "instance_group { passive: true }")
    settings = Settings(paths=(tmp_path,), strict_readiness=False)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        assert await ready(served)
        assert not await model_ready(served, "bad")
        answer = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
