"""Model repositories as written for Triton, using many fields of `config.pbtxt` at once, served unchanged by a real
process, and checked with NVIDIA's clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest
import tritonclient.grpc
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.utils import InferenceServerException

from tests import models
from tests.conformance.triton import Triton, assert_same_bits, outputs_of, tensors
from tests.harness import ServerProcess
from tests.operators import build_library, twice

Array = np.ndarray[Any, np.dtype[Any]]

# A batch leaves with four rows, or not before the tests are over.
CLASSIFIER = """
# Classifies vectors. Version 2 was withdrawn.
name: "classifier"
platform: "onnxruntime_onnx"
backend: "onnxruntime"
runtime: ""
version_policy { specific { versions: [ 1, 3 ] } }
default_model_filename: "net.onnx"
max_batch_size: 8
input [
  { name: "INPUT0", data_type: TYPE_FP32, format: FORMAT_NONE, dims: [ 4, 4 ], reshape: { shape: [ 16 ] } }
]
output [
  { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ 4 ], label_filename: "labels.txt" }
]
instance_group [
  { name: "cpus" count: 2 kind: KIND_CPU rate_limiter { resources [ { name: "R1" count: 1 } ] priority: 1 } }
]
dynamic_batching {
  preferred_batch_size: [ 4 ]
  max_queue_delay_microseconds: 600000000
  priority_levels: 2
  default_priority_level: 1
  default_queue_policy { max_queue_size: 3 }
  priority_queue_policy {
    key: 2
    value { timeout_action: REJECT default_timeout_microseconds: 300000000 allow_timeout_override: true }
  }
}
optimization {
  graph { level: 1 }
  priority: PRIORITY_MAX
  cuda { graphs: true }
  input_pinned_memory { enable: false }
  output_pinned_memory { enable: false }
  gather_kernel_buffer_threshold: 1
  eager_batching: true
}
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
parameters { key: "inter_op_thread_count" value { string_value: "1" } }
parameters { key: "somebodys_own" value { string_value: "kept" } }
model_warmup [
  {
    name: "zeros"
    batch_size: 4
    inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 4, 4 ] zero_data: true } }
  },
  {
    name: "anything"
    batch_size: 1
    count: 2
    inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 4, 4 ] random_data: true } }
  },
  {
    name: "from a file"
    batch_size: 1
    inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 4, 4 ] input_data_file: "one_row" } }
  }
]
metric_tags { key: "team" value: "search" }
metric_tags { key: "tier" value: "1" }
cc_model_filenames { key: "7.5" value: "net_turing.onnx" }
model_metrics {
  metric_control: [
    { metric_identifier: { family: "nv_inference_first_response_histogram_ms" } histogram_options: { buckets: [ 1 ] } }
  ]
}
model_transaction_policy { decoupled: false }
response_cache { enable: false }
"""
# Elements of requests of any length, concatenated, two requests per batch.
RAGGED = """
backend: "onnxruntime"
version_policy: { latest: { num_versions: 2 } }
max_batch_size: 16
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
batch_output [ { target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0" } ]
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 600000000 preserve_ordering: true }
instance_group [ { kind: KIND_CPU } ]
"""
OPERATORS = """
version_policy: { all { } }
model_operations { op_library_filename: "libtwice.so" }
"""
OPTIONAL = """
max_batch_size: 0
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "BIAS" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

SAMPLES = {"zeros": 1, "anything": 2, "from a file": 1}
"""How often each runs on an instance."""
SERVED = {
    "bare": ["1"],
    "classifier": ["1", "3"],
    "operators": ["1", "2"],
    "optional": ["1"],
    "ragged": ["2", "3"],
}
"""Models and versions."""


def write_apart(model: onnx.ModelProto, path: Path) -> None:
    """Write the model with its weights in a separate file beside it."""
    path.parent.mkdir(parents=True)
    onnx.save_model(model, path, save_as_external_data=True, location=f"{path.stem}.weights", size_threshold=0)


def write_repositories(folder: Path) -> list[Path]:
    """Write two repositories; their paths."""
    one, other = folder / "one", folder / "other"
    for version in (1, 2, 3):
        write_apart(models.mlp(seed=version), one / "classifier" / str(version) / "net.onnx")
        models.write(models.ragged(version), one / "ragged" / str(version) / "model.onnx")
    (one / "classifier" / "labels.txt").write_text("cat\ndog\n")
    (one / "classifier" / "warmup").mkdir()
    (one / "classifier" / "warmup" / "one_row").write_bytes(bytes(64))
    (one / ".git").mkdir()
    for version in (1, 2):
        models.write(twice(), other / "operators" / str(version) / "model.onnx")
        build_library(other / "operators" / str(version) / "libtwice.so")
    models.write(models.with_default(), other / "optional" / "1" / "model.onnx")
    write_apart(models.mlp(), other / "bare" / "1" / "model.onnx" / "model.onnx")
    texts = {"one/classifier": CLASSIFIER, "one/ragged": RAGGED, "other/operators": OPERATORS}
    for name, text in {**texts, "other/optional": OPTIONAL}.items():
        (folder / name / "config.pbtxt").write_text(text)
    return [one, other]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    one, other = write_repositories(tmp_path_factory.mktemp("repositories"))
    args = ["--model-repository", str(other), "--model-control-mode", "explicit", "--load-model", "*"]
    args += ["--allow-op-libraries", "true", "--log-level", "debug", "--exit-on-error", "true"]
    with ServerProcess(one, args=args) as started:
        yield started


@pytest.fixture
def triton(either: Triton) -> Triton:
    return either


def samples(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, 4, 4), np.float32)


def answer(version: int, sent: Array) -> Array:
    """ONNX Runtime's own answer."""
    session = ort.InferenceSession(models.mlp(seed=version).SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(["OUTPUT0"], {"INPUT0": sent.reshape(-1, 16)})
    return np.asarray(output)


async def executions(triton: Triton, model: str, version: str) -> dict[int, int]:
    """Executions by their rows."""
    (one,) = (await triton.get_inference_statistics(model, version)).model_stats
    return {batch.batch_size: batch.compute_infer.count for batch in one.batch_stats}


# ---- What is served --------------------------------------------------------------------------------------------------


async def test_models_of_all_repositories_serve_the_versions_of_their_policies(triton: Triton) -> None:
    assert await triton.is_server_ready()
    found: dict[str, list[str]] = {}
    for line in (await triton.get_model_repository_index()).models:
        assert (line.state, line.reason) == ("READY", "")
        found.setdefault(line.name, []).append(line.version)
    assert found == SERVED
    for name, versions in SERVED.items():
        assert list((await triton.get_model_metadata(name)).versions) == versions
        assert all([await triton.is_model_ready(name, version) for version in ("", *versions)])
    with pytest.raises(InferenceServerException, match="version 2"):
        await triton.is_model_ready("classifier", "2")


async def test_configuration_comes_back_with_all_that_was_written(triton: Triton) -> None:
    written = text_format.Parse(CLASSIFIER, triton_config.ModelConfig())
    told = (await triton.get_model_config("classifier", "1")).config
    # The server adds names of groups, and a device for each.
    assert [(one.name, one.count, one.kind) for one in told.instance_group] == [
        ("cpus", 2, triton_config.ModelInstanceGroup.KIND_CPU)
    ]
    for field in ("instance_group", "runtime"):
        written.ClearField(field)
        told.ClearField(field)
    for field, _ in written.ListFields():
        assert getattr(told, field.name) == getattr(written, field.name), field.name


# ---- Answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "served"), [("1", 1), ("3", 3), ("", 3)])
async def test_each_version_answers_with_its_own_weights(triton: Triton, version: str, served: int) -> None:
    sent = samples(4, served)
    result = await triton.infer("classifier", tensors({"INPUT0": sent}), model_version=version)
    assert result.get_response().model_version == str(served)
    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), answer(served, sent), rtol=1e-5, atol=1e-6)


async def test_requests_of_a_preferred_batch_may_ask_for_classes(triton: Triton) -> None:
    before = await executions(triton, "classifier", "1")
    one, other = samples(3, 1), samples(1, 2)
    wanted = [tritonclient.grpc.InferRequestedOutput("OUTPUT0", class_count=2)]
    whole, classes = await asyncio.gather(
        triton.infer("classifier", tensors({"INPUT0": one}), model_version="1"),
        triton.infer("classifier", tensors({"INPUT0": other}), model_version="1", outputs=wanted),
    )
    np.testing.assert_allclose(whole.as_numpy("OUTPUT0"), answer(1, one), rtol=1e-5, atol=1e-6)
    first, second = np.argsort(-answer(1, other)[0])[:2].tolist()
    names = {0: "cat", 1: "dog"}
    found = [text.decode().split(":")[1:] for text in classes.as_numpy("OUTPUT0")[0]]
    assert found == [[str(index), *([names[index]] if index in names else [])] for index in (first, second)]
    after = await executions(triton, "classifier", "1")
    assert set(after) == {4}
    assert after[4] - before.get(4, 0) == 1


async def test_queue_policy_of_the_lower_level_lets_requests_shorten_their_timeout(triton: Triton) -> None:
    """Without it, the request would wait for ten minutes."""
    with pytest.raises(InferenceServerException) as raised:
        await triton.infer("classifier", tensors({"INPUT0": samples(1)}), priority=2, timeout=20_000)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"


async def test_ragged_requests_share_a_batch_and_get_outputs_of_their_own_length(triton: Triton) -> None:
    before = await executions(triton, "ragged", "2")
    sent = [np.full((1, size), size, np.float32) for size in (3, 5)]
    results = await asyncio.gather(
        *(triton.infer("ragged", tensors({"INPUT0": one}), model_version="2") for one in sent)
    )
    for one, result in zip(sent, results, strict=True):
        assert_same_bits(outputs_of(result), {"OUTPUT0": one + np.float32(2)})
    after = await executions(triton, "ragged", "2")
    assert after[2] - before.get(2, 0) == 1
    assert set(after) == {2}


@pytest.mark.parametrize("version", ["1", "2"])
async def test_operators_of_libraries_beside_the_model_are_used(triton: Triton, version: str) -> None:
    sent = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = await triton.infer("operators", tensors({"INPUT0": sent}), model_version=version)
    assert_same_bits(outputs_of(result), {"OUTPUT0": 2 * sent})


async def test_optional_input_may_be_left_out(triton: Triton) -> None:
    sent, bias = np.arange(3, dtype=np.float32), np.array([7], np.float32)
    without = await triton.infer("optional", tensors({"INPUT0": sent}))
    assert_same_bits(outputs_of(without), {"OUTPUT0": sent, "OUTPUT1": np.array([10], np.float32)})
    given = await triton.infer("optional", tensors({"INPUT0": sent, "BIAS": bias}))
    assert_same_bits(outputs_of(given), {"OUTPUT0": sent, "OUTPUT1": bias})


async def test_model_in_a_folder_with_its_weights_answers_without_a_configuration(triton: Triton) -> None:
    sent = samples(2)
    result = await triton.infer("bare", tensors({"INPUT0": sent.reshape(2, 16)}))
    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), answer(0, sent), rtol=1e-5, atol=1e-6)


# ---- Metrics and logs ------------------------------------------------------------------------------------------------


def test_metrics_of_each_version_carry_the_tags(server: ServerProcess) -> None:
    metrics = server.metrics()
    tagged = [f'{{_team="search",_tier="1",model="classifier",version="{version}"}}' for version in (1, 3)]
    assert all(f"nv_inference_count{labels}" in metrics for labels in tagged)
    assert not [name for name in metrics if "_team" in name and 'model="classifier"' not in name]


def test_warm_up_ran_each_sample_on_each_instance_before_the_server_was_ready(server: ServerProcess) -> None:
    said = [record["message"] for record in server.log]
    before = said[: next(number for number, text in enumerate(said) if text.startswith("ready: "))]
    assert sum("is running warmup sample" in text for text in before) == 2 * 2 * sum(SAMPLES.values())
    for sample, count in SAMPLES.items():
        last = f"model 'classifier' is running warmup sample '{sample}' for iteration {count}"
        # Two versions of two instances each.
        assert before.count(last) == 2 * 2


# ---- Changes ---------------------------------------------------------------------------------------------------------


async def test_model_is_replaced_with_another_configuration_and_restored(triton: Triton) -> None:
    override = json_format.MessageToDict(text_format.Parse(CLASSIFIER, triton_config.ModelConfig()))
    override["versionPolicy"] = {"latest": {"numVersions": 1}}
    await triton.load_model("classifier", config=json.dumps(override))
    assert list((await triton.get_model_metadata("classifier")).versions) == ["3"]
    override["instanceGroup"] = [{"passive": True}]
    with pytest.raises(InferenceServerException, match=r"instance_group\.passive is not supported"):
        await triton.load_model("classifier", config=json.dumps(override))
    assert await triton.is_model_ready("classifier", "3")
    await triton.load_model("classifier")
    assert list((await triton.get_model_metadata("classifier")).versions) == ["1", "3"]
    sent = samples(4)
    result = await triton.infer("classifier", tensors({"INPUT0": sent}), model_version="1")
    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), answer(1, sent), rtol=1e-5, atol=1e-6)
