"""Every kind of model computes rows: pipelines, generations, Python, processes of their own, without a batch axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from paceline.server.bulk.models import engine_model, model_paths
from paceline.server.bulk.values import BulkError
from paceline.server.models.defaults import Offline
from tests import decoder_models, models, text_models
from tests.ensembles import ensemble_config, write_ensemble
from tests.generation_truth import Asked, NaiveLoop
from tests.integration.computing_rows import Became, rows_became
from tests.integration.serving import echo_model, write_model
from tests.memory_models import MemoryBackend

OWN = 'parameters { key: "paceline.own_process" value { string_value: "true" } }'
PYTHON = """
class Model:
    inputs = {"x": ("INT64", [-1, 1])}
    outputs = {"y": ("INT64", [-1, 1])}

    def execute(self, inputs):
        if (inputs["x"] < 0).any():
            raise ValueError("expected no negative number")
        return {"y": inputs["x"] * 2}
"""


async def computed(
    path: Path, columns: Mapping[str, pa.Array], rows: int = 8, output: str = "", **settings: Any
) -> Became:
    """What the model at `path` makes of these rows, in calls of so many; of its first output, or that of this name."""
    async with engine_model(path, max_rows=rows, offline=Offline(), **settings) as model:
        return await rows_became(model, columns, rows, output=output)


async def test_row_that_ends_the_models_process_costs_only_itself(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    models.write(models.quotient(), folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(f"max_batch_size: 8 dynamic_batching {{ }} {OWN}")
    smallest, kind = -(2**63), pa.list_(pa.int64(), 1)
    first = [[8], [9], [smallest], [10], [12], [14], [16], [18], [20]]
    second = [[2], [3], [-1], [5], [2], [2], [2], [2], [2]]
    became = await computed(folder, {"INPUT0": pa.array(first, kind), "INPUT1": pa.array(second, kind)})
    assert became.outputs == {0: [4], 1: [3], 3: [2], 4: [6], 5: [7], 6: [8], 7: [9], 8: [10]}
    assert became.reasons.keys() == {2}
    assert "killed by SIGFPE" in became.reasons[2]


async def test_python_model_computes_rows_and_says_which_fail(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(PYTHON)
    numbers = {"x": pa.array([[3], [-1], [5]], pa.list_(pa.int64(), 1))}
    became = await computed(tmp_path / "m", numbers, allow_python_models=True)
    assert became.outputs == {0: [6], 2: [10]}
    assert became.reasons.keys() == {1}
    assert "expected no negative number" in became.reasons[1]


async def test_each_row_of_a_decoder_is_a_whole_generation(tmp_path: Path) -> None:
    folder = decoder_models.write(decoder_models.TINY, tmp_path / "m" / "1")
    prompts = [[5, 6, 7], [9], [10**6], [3, 1, 4, 1, 5]]
    truth = NaiveLoop(folder)
    columns = {"input_ids": pa.array(prompts, pa.list_(pa.int64()))}
    became = await computed(tmp_path / "m", columns, parameters={"max_tokens": 4})
    expected = {place: truth.generate(prompts[place], Asked(max_tokens=4)).tokens for place in (0, 1, 3)}
    assert became.outputs == expected
    assert became.reasons.keys() == {2}
    assert "expected tokens from 0 to" in became.reasons[2]


async def test_texts_to_a_decoder_become_texts(tmp_path: Path) -> None:
    tokenizer = text_models.byte_level()
    speaks = replace(decoder_models.TINY, vocabulary=320, end_tokens=(2,))
    folder = text_models.write(tokenizer, decoder_models.write(speaks, tmp_path / "m" / "1"))
    prompts, truth = ["the cat", "stop one, two", "é 日本 👋!"], NaiveLoop(folder)
    given: dict[str, Any] = {"max_tokens": 5, "exclude_input_in_output": True}
    became = await computed(tmp_path / "m", {"text_input": pa.array(prompts)}, output="output_ids", parameters=given)
    tokens = [truth.generate(tokenizer.encode(prompt).ids, Asked(max_tokens=5)).tokens for prompt in prompts]
    assert became == Became(dict(enumerate(tokens)))
    became = await computed(tmp_path / "m", {"text_input": pa.array(prompts)}, output="text_output", parameters=given)
    assert became.reasons == {}
    assert [value for _, value in sorted(became.outputs.items())] == [
        [tokenizer.decode(one, skip_special_tokens=True).encode()] for one in tokens
    ]


async def test_rows_of_a_pipeline_stay_together_in_its_steps(tmp_path: Path) -> None:
    steps = [("first", {"a": "in"}, {"x": "mid"}), ("second", {"a": "mid"}, {"x": "out"})]
    folder = write_ensemble(tmp_path, "e", ensemble_config(steps))
    used = {"first": echo_model(), "second": echo_model()}
    for name in (*used, "third"):
        write_model(tmp_path, name, "max_batch_size: 8 dynamic_batching { }")
    rows = [[float(number)] for number in range(20)]
    columns = {"in": pa.array(rows, pa.list_(pa.float32(), 1))}
    became = await computed(folder, columns, backend_of=lambda _: MemoryBackend(used))
    assert became == Became(dict(enumerate(rows)), {})
    for model in used.values():
        assert sorted(model.batches) == [(4,), (8,), (8,)]


async def test_calls_of_a_model_without_batch_axis_are_rows(tmp_path: Path) -> None:
    models.write(models.add_sub(size=2, batched=False), tmp_path / "m" / "1" / "model.onnx")
    whole = ", ".join(f'{{ name: "%s{number}" data_type: TYPE_INT32 dims: [ 2 ] }}' for number in (0, 1))
    config = f"input [ {whole.replace('%s', 'INPUT')} ] output [ {whole.replace('%s', 'OUTPUT')} ]"
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    kind = pa.list_(pa.int32(), 2)
    columns = {"INPUT0": pa.array([[1, 2], [3, 4]], kind), "INPUT1": pa.array([[10, 20], [30, 40]], kind)}
    became = await computed(tmp_path / "m", columns)
    assert became == Became({0: [11, 22], 1: [33, 44]}, {})


async def test_steps_take_more_rows_than_calls_have(tmp_path: Path) -> None:
    (tmp_path / "double" / "1").mkdir(parents=True)
    (tmp_path / "double" / "1" / "model.py").write_text(PYTHON)
    config = ensemble_config([("double", {"x": "in"}, {"y": "out"})], {"in": "INT64 1"}, {"out": "INT64 1"})
    folder = write_ensemble(tmp_path, "e", config)
    numbers = {"in": pa.array([[3], [5]], pa.list_(pa.int64(), 1))}
    became = await computed(folder, numbers, 1, allow_python_models=True)
    assert became.outputs == {0: [6], 1: [10]}


async def test_model_that_may_answer_more_than_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(PYTHON)
    (tmp_path / "m" / "config.pbtxt").write_text("model_transaction_policy { decoupled: true }")
    with pytest.raises(BulkError, match="model 'm' can't compute rows: it may answer a request more than once"):
        await computed(tmp_path / "m", {}, allow_python_models=True)


async def test_folder_that_is_no_single_model_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        models.write(models.mlp(), tmp_path / name / "1" / "model.onnx")
    with pytest.raises(BulkError, match=r"expected one model, as in .*/one, got a repository of one, two"):
        await computed(tmp_path, {})


def test_models_that_a_model_needs_are_found_beside_it(tmp_path: Path) -> None:
    steps = [("first", {"a": "in"}, {"x": "mid"}), ("second", {"a": "mid"}, {"x": "out"})]
    folder = write_ensemble(tmp_path, "e", ensemble_config(steps))
    write_model(tmp_path, "first", 'parameters { key: "paceline.calls" value { string_value: "third, first" } }')
    write_model(tmp_path, "third")
    with pytest.raises(BulkError, match="expected a folder beside it of model 'second', which it needs, got none"):
        model_paths(folder)
    write_model(tmp_path, "second")
    assert [path.name for path in model_paths(folder)] == ["e", "first", "second", "third"]
    (folder / "config.pbtxt").write_text("max_batch_size: no")
    with pytest.raises(BulkError, match=r"config\.pbtxt:1:"):
        model_paths(folder)
