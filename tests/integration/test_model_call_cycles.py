"""Python models whose calls come back to them: what can't be answered is told, and the rest is answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from tests.calling_puppet import write_caller
from tests.integration.calling import ALONE, ECHO, TELL, asking, echoing, numbers, served
from tests.integration.serving import echo_model, failure_of


async def test_model_that_waits_for_itself_is_told(tmp_path: Path) -> None:
    again = "y = models['m'].infer({'x': x, 'run': [[b'y += 5']]})['y']"
    async with served(tmp_path, ALONE, calls="m") as started:
        _, text = await failure_of(started.infer(asking(TELL % again)))
        assert "RESOURCE_EXHAUSTED: model 'm' can't answer this call: all its instances wait" in text
        assert numbers(await started.infer(asking("y += 1"))) == [1] * 4


async def test_model_that_calls_itself_is_answered_by_another_instance(tmp_path: Path) -> None:
    again = "y = models['m'].infer({'x': x, 'run': [[b'y += 5']]})['y']"
    async with served(tmp_path, f"{ALONE} instance_group {{ count: 2 }}", calls="m") as started:
        assert numbers(await started.infer(asking(again))) == [5] * 4
        deeper = f"y = models['m'].infer({{'x': x, 'run': [[{again.encode()!r}]]}})['y']"
        assert "can't answer this call" in (await failure_of(started.infer(asking(TELL % deeper))))[1]
        assert numbers(await started.infer(asking(again))) == [5] * 4


async def test_cycle_of_models_is_told_where_it_closes(tmp_path: Path) -> None:
    back = TELL % "models['m'].infer({'x': x, 'run': [[b'']]})"
    there = TELL % f"models['other'].infer({{'x': x, 'run': [[{back.encode()!r}]]}})"
    write_caller(tmp_path, ALONE, calls="m", name="other")
    async with served(tmp_path, ALONE, calls="other") as started:
        _, text = await failure_of(started.infer(asking(there)))
        assert "model 'other': ValueError: RESOURCE_EXHAUSTED: model 'm' can't answer this call" in text
        assert numbers(await started.infer(asking("y += 1"))) == [1] * 4


async def test_concurrent_calls_to_itself_end_all(tmp_path: Path) -> None:
    again = "y = models['m'].infer({'x': x, 'run': [[b'y += 5']]})['y']"
    async with served(tmp_path, f"{ALONE} instance_group {{ count: 2 }}", calls="m") as started:
        ended = await asyncio.gather(*(started.infer(asking(again)) for _ in range(16)), return_exceptions=True)
        good = [numbers(one) for one in ended if isinstance(one, pb.ModelInferResponse)]
        assert good == [[5] * 4] * len(good)
        assert all("can't answer this call" in str(one) for one in ended if isinstance(one, BaseException))
        assert numbers(await started.infer(asking(again))) == [5] * 4


async def test_cycle_through_an_ensemble_is_told(tmp_path: Path) -> None:
    back = TELL % "models['both'].infer({'run': [[b'']], 'x': x})"
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "config.pbtxt").write_text("""
platform: "ensemble" max_batch_size: 1
input { name: "run" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step {
  model_name: "m"
  input_map { key: "run" value: "run" }
  input_map { key: "x" value: "x" }
  output_map { key: "y" value: "y" }
} }
""")
    async with served(tmp_path, ALONE, calls="both") as started:
        for model in ("m", "both"):
            _, text = await failure_of(started.infer(asking(back, model=model)))
            assert "ValueError: RESOURCE_EXHAUSTED: model 'both' can't answer this call" in text
        assert numbers(await started.infer(asking("y += 1", model="both"))) == [1] * 4


async def test_thread_that_execute_waits_for_is_told_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.requests.model_calls._PATIENCE_S", 0.1)
    again = """
def call():
    try:
        models['m'].infer({'x': x, 'run': [[b'']]})
    except models.CallFailed as error:
        model.kept.append(error)
thread = threading.Thread(target=call)
thread.start()
thread.join()
raise model.kept.pop()
"""
    async with served(tmp_path, ALONE, calls="m") as started:
        status, text = await failure_of(started.infer(asking(again)))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "model 'm' can't answer this call" in text


async def test_cycle_that_closes_late_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.requests.model_calls._PATIENCE_S", 0)
    write_caller(tmp_path, ALONE, calls="echo, m", name="other")
    back = f"{ECHO}\nmodels['m'].infer({{'x': x, 'run': [[b'']]}})"
    there = f"""
def call():
    models['other'].infer({{'x': x, 'run': [[{back.encode()!r}]]}})
thread = threading.Thread(target=call)
thread.start()
thread.join()
y += 3
"""
    async with echoing(tmp_path, echo := echo_model(), ALONE, calls="other") as started:
        echo.gate.close()
        asked = asyncio.ensure_future(started.infer(asking(there)))
        await asyncio.to_thread(echo.gate.wait_entered, 1)  # by now, the thread's call has been looked at
        echo.gate.open()
        assert numbers(await asked) == [3] * 4
        assert started.failed("other") == 1
