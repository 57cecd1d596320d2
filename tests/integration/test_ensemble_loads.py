"""Ensembles as they come and go with the models that they need, and why they can't be loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests.ensembles import ensemble_config, write_ensemble
from tests.harness import touch
from tests.integration.controlling import explicit, index, load, unload
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

CHAIN = [("first", {"a": "in"}, {"x": "mid"}), ("second", {"a": "mid"}, {"x": "out"})]
BATCHED = "max_batch_size: 8 dynamic_batching { }"
ONE = [("first", {"a": "in"}, {"x": "out"})]
TWO = [("first", {"a": "in"}, {"x": "mid"}), ("two", {"a": "mid", "b": "in"}, {"x": "out", "y": "more"})]


def model(inputs: Mapping[str, str], outputs: Mapping[str, str]) -> MemoryModel:
    """With datatype and dims of each tensor, as in "FP32 -1", behind a batch axis."""

    def tensors(named: Mapping[str, str]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, said.split()[0], (-1, *map(int, said.split()[1:]))) for name, said in named.items()
        )

    return MemoryModel(ModelSpec(tensors(inputs), tensors(outputs)))


MODELS = {
    "first": echo_model(),
    "second": echo_model(),
    "ints": model({"a": "INT32 -1"}, {"x": "INT32 -1"}),
    "cube": model({"a": "FP32 -1 -1"}, {"x": "FP32 -1 -1"}),
    "two": model({"a": "FP32 -1", "b": "FP32 -1"}, {"x": "FP32 -1", "y": "FP32 -1"}),
}


@asynccontextmanager
async def loading(
    root: Path, ensembles: Mapping[str, str], models: Mapping[str, MemoryModel] | None = None, *first: str
) -> AsyncIterator[Served]:
    """Ensembles with their configurations and models, of which only `first` are loaded at the start."""
    for name, config in ensembles.items():
        write_ensemble(root, name, config)
    settings = explicit(root, load=first)
    async with serving(
        root, models or {"first": echo_model(), "second": echo_model()}, config=BATCHED, settings=settings
    ) as started:
        yield started


async def serves(started: Served, name: str) -> bool:
    return any(line[0] == name and line[2] == "READY" for line in await index(started))


async def reason(started: Served, name: str) -> str:
    return next(line[3] for line in await index(started) if line[0] == name)


UNFIT = {
    "batch size": (
        ensemble_config(ONE, rows=16),
        "ensemble e allows maximum batch size 16, but it contains model first which only allows maximum batch size "
        "to be 8",
    ),
    "no such input": (
        ensemble_config([("first", {"a": "in", "b": "in"}, {"x": "out"})]),
        "in ensemble e, ensemble tensor in is mapping to non-existing input b in model first: expected one of ['a']",
    ),
    "no such output": (
        ensemble_config([("first", {"a": "in"}, {"y": "out"})]),
        "in ensemble e, ensemble tensor out is mapped from non-existing output y in model first: expected one of ['x']",
    ),
    "input without tensor": (
        ensemble_config([("two", {"a": "in"}, {"x": "out"})]),
        "in ensemble e, input b in model two is not mapped to any ensemble tensors",
    ),
    "datatype of an input": (
        ensemble_config([("ints", {"a": "in"}, {"x": "out"})]),
        "in ensemble e, ensemble tensor in: inconsistent data type: TYPE_INT32 is inferred from model ints while "
        "TYPE_FP32 from model e",
    ),
    "datatype between steps": (
        ensemble_config(
            [("first", {"a": "in"}, {"x": "mid"}), ("ints", {"a": "mid"}, {"x": "out"})], outputs={"out": "INT32 -1"}
        ),
        "in ensemble e, ensemble tensor mid: inconsistent data type: TYPE_INT32 is inferred from model ints while "
        "TYPE_FP32 from model first",
    ),
    "shape": (
        ensemble_config(
            [("first", {"a": "in"}, {"x": "mid"}), ("cube", {"a": "mid"}, {"x": "out"})], outputs={"out": "FP32 -1 -1"}
        ),
        "in ensemble e, ensemble tensor mid: inconsistent shape: [-1, -1, -1] is inferred from model cube while "
        "[-1, -1] is inferred from model first",
    ),
    "unknown models": (
        ensemble_config([("b", {"a": "in"}, {"x": "mid"}), ("c", {"a": "mid"}, {"x": "out"})]),
        "ensemble e contains models that are not available or ambiguous: b, c; expected them in the model repository; "
        "give the folder that holds them all, or each as a path",
    ),
    "unknown version": (
        ensemble_config([("first:7", {"a": "in"}, {"x": "out"})]),
        "ensemble 'e' depends on 'first' whose required version 7 is not loaded; it serves ['1']",
    ),
    "itself": (ensemble_config([("e", {"in": "in"}, {"out": "out"})]), "circular dependency between ensembles: e -> e"),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_ensemble_that_does_not_fit_its_models_says_why(tmp_path: Path, what: str) -> None:
    config, text = UNFIT[what]
    async with loading(tmp_path, {"e": config}, MODELS) as started:
        status, said = await failure_of(load(started, "e"))
        assert (status, said) == (grpc.StatusCode.INVALID_ARGUMENT, f"load failed for model 'e': {text}")
        assert await reason(started, "e") == text


async def test_ensembles_that_need_each_other_say_so(tmp_path: Path) -> None:
    there = {name: ensemble_config([(other, {"in": "in"}, {"out": "out"})]) for name, other in (("a", "b"), ("b", "a"))}
    async with loading(tmp_path, there) as started:
        status, said = await failure_of(load(started, "a"))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert "ensemble 'a' depends on 'b' which has no loaded version" in said
        assert await reason(started, "b") == "circular dependency between ensembles: b -> a -> b"


async def test_loading_an_ensemble_loads_what_it_needs(tmp_path: Path) -> None:
    there = {"e": ensemble_config(CHAIN), "outer": ensemble_config([("e", {"in": "in"}, {"out": "out"})])}
    async with loading(tmp_path, there) as started:
        await load(started, "outer")
        assert [line[:3] for line in await index(started)] == [
            (name, "1", "READY") for name in ("e", "first", "outer", "second")
        ]
        rows = rows_of_floats(1)
        assert (await started.infer(infer("outer", {"in": rows}))).raw_output_contents[0] == rows.tobytes()


async def test_models_of_ensembles_are_loaded_at_the_start(tmp_path: Path) -> None:
    async with loading(tmp_path, {"e": ensemble_config(CHAIN)}, None, "e") as started:
        assert await serves(started, "e")


async def test_model_that_fails_to_load_is_the_ensembles_reason(tmp_path: Path) -> None:
    write_model(tmp_path, "second", 'backend: "none"')
    (tmp_path / "second" / "config.pbtxt").write_text('backend: "none"')
    async with loading(tmp_path, {"e": ensemble_config(CHAIN)}) as started:
        _, said = await failure_of(load(started, "e"))
        assert said.startswith(
            "load failed for model 'e': ensemble 'e' depends on 'second' which has no loaded version. "
            "Model 'second' loading failed with error: "
        )
        assert await serves(started, "first")  # what did load stays


async def test_ensembles_go_with_a_model_and_come_back_with_it(tmp_path: Path) -> None:
    there = {
        "e": ensemble_config(CHAIN),
        "outer": ensemble_config([("e", {"in": "in"}, {"out": "out"})]),
        "other": ensemble_config(ONE),
    }
    async with loading(tmp_path, there) as started:
        for name in ("outer", "other"):
            await load(started, name)
        await unload(started, "second")
        assert [await serves(started, name) for name in ("e", "outer", "other")] == [False, False, True]
        assert await reason(started, "e") == "unloaded"
        status, text = await failure_of(started.infer(infer("outer", {"in": rows_of_floats(1)})))
        assert status is grpc.StatusCode.NOT_FOUND
        assert "has no available versions" in text
        await load(started, "second")
        assert [await serves(started, name) for name in ("e", "outer", "other")] == [True, True, True]


async def test_ensemble_unloaded_by_itself_does_not_come_back(tmp_path: Path) -> None:
    async with loading(tmp_path, {"e": ensemble_config(CHAIN)}) as started:
        await load(started, "e")
        await unload(started, "e")
        await load(started, "second")
        assert not await serves(started, "e")


async def test_models_loaded_for_an_ensemble_go_with_it_if_asked_to(tmp_path: Path) -> None:
    there = {"e": ensemble_config(CHAIN), "other": ensemble_config(ONE)}
    async with loading(tmp_path, there) as started:
        for name in ("e", "other"):
            await load(started, name)
        request = pb.RepositoryModelUnloadRequest(model_name="e")
        request.parameters["unload_dependents"].bool_param = True
        await started.stub.RepositoryModelUnload(request)
        assert [await serves(started, name) for name in ("e", "first", "second")] == [False, True, False]


async def test_load_of_an_ensemble_leaves_changed_models_to_their_own(tmp_path: Path) -> None:
    async with loading(tmp_path, {"e": ensemble_config(CHAIN)}) as started:
        await load(started, "e")
        before = started.server.repository.get("second", "")
        for changed in ("second", "e"):
            touch(tmp_path / changed)
            await load(started, "e")
        assert started.server.repository.get("second", "") is before


async def test_reload_of_a_model_keeps_requests_between_its_ensembles_steps(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with loading(tmp_path, {"e": ensemble_config(CHAIN)}, models) as started:
        await load(started, "e")
        models["first"].gate.close()
        earlier = asyncio.ensure_future(started.infer(infer("e", {"in": rows_of_floats(1)})))
        await eventually_async(lambda: models["first"].gate.entered == 1, "an execution that is held")
        before = started.server.repository.get("second", "")
        models["second"] = echo_model()
        models["second"].gate.close()
        touch(tmp_path / "second")
        await load(started, "second")
        assert started.server.repository.get("second", "") is not before
        later = [asyncio.ensure_future(started.infer(infer("e", {"in": rows_of_floats(1)}))) for _ in range(2)]
        await eventually_async(lambda: started.waiting("first") == 2, "requests to the ensemble as it is now")
        models["first"].gate.open()
        assert len((await earlier).outputs) == 1
        assert before.statistics.execution_count == 1
        # What the ensemble was before stops while what it is now executes.
        await eventually_async(lambda: not started.server.repository.leaving, "the version before to go")
        models["second"].gate.open()
        assert [len(one.outputs) for one in await asyncio.gather(*later)] == [1, 1]
        assert started.server.repository.get("second", "").statistics.requests.count == 2


async def test_model_that_no_longer_fits_takes_its_ensemble_out_of_service(tmp_path: Path) -> None:
    models = {"first": echo_model(), "second": echo_model()}
    async with loading(tmp_path, {"e": ensemble_config(CHAIN)}, models) as started:
        await load(started, "e")
        fits = models["second"].spec
        models["second"].spec = replace(fits, inputs=(TensorSpec("b", "FP32", (-1, -1)),))
        touch(tmp_path / "second")
        await load(started, "second")
        assert await reason(started, "e") == (
            "in ensemble e, ensemble tensor mid is mapping to non-existing input a in model second: "
            "expected one of ['b']"
        )
        models["second"].spec = fits
        touch(tmp_path / "second")
        await load(started, "second")
        assert await serves(started, "e")


async def test_failed_reload_leaves_an_ensemble_that_follows_its_models(tmp_path: Path) -> None:
    async with loading(tmp_path, {"e": ensemble_config(CHAIN)}) as started:
        await load(started, "e")
        write_ensemble(tmp_path, "e", ensemble_config([("first", {"b": "in"}, {"x": "out"})]))
        _, text = await failure_of(load(started, "e"))
        assert "ensemble tensor in is mapping to non-existing input b in model first" in text
        await load(started, "second")
        rows = rows_of_floats(1)
        assert (await started.infer(infer("e", {"in": rows}))).raw_output_contents[0] == rows.tobytes()
        assert started.server.repository.get("second", "").statistics.execution_count == 1


async def test_ensemble_without_explicit_control_waits_for_its_models(tmp_path: Path) -> None:
    write_ensemble(tmp_path, "e", ensemble_config(CHAIN))
    models = {"first": echo_model(), "second": echo_model()}
    async with serving(tmp_path, models, config=BATCHED, settings=Settings(paths=(tmp_path,))) as started:
        assert await serves(started, "e")
