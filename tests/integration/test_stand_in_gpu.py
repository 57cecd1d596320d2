"""The CUDA path on a stand-in for a GPU (`tests/cuda/stand_in.py`): ONNX Runtime's own provider, from the wheel, on
libraries that execute the queued work as late, or in as random an order, as CUDA allows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from bench.summary import load
from paceline.protos import inference_pb2 as pb
from paceline.protos.model_config_pb2 import ModelInstanceGroup
from tests import decoder_models, models
from tests.decoder_models import TINY
from tests.harness import REPO, run_command
from tests.integration.stand_in_server import GPUS, Served, libraries, write
from tests.lengths import LONG
from tests.polling import eventually
from tests.wire import infer

__all__ = ["libraries"]

_OPTIONS = ("-o", "addopts=--import-mode=importlib", "-m", "gpu", "-rs", "-p", "no:cacheprovider", "-q")
_WITHOUT = ("libnvinfer.so.10: cannot open", "only a stand-in that is always late")
SIZES = 'parameters { key: "paceline.batch_sizes" value { string_value: "1,4,16" } }'
GRAPHS = f"optimization {{ cuda {{ graphs: true }} }} {SIZES}"
EXACT = "paceline, paceline.pad off"
UUIDS = [f"GPU-{byte * 4}-{byte * 2}-{byte * 2}-{byte * 2}-{byte * 6}" for byte in ("10", "11")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "seed", ["", "1", "2"] if LONG else [""], ids=lambda seed: f"random-{seed}" if seed else "late"
)
def test_tests_marked_gpu_pass(seed: str, libraries: Path, tmp_path: Path) -> None:
    files = [str(one) for one in (REPO / "tests").rglob("test_*.py") if "mark.gpu" in one.read_text()]
    options = (*_OPTIONS, "--basetemp", str(tmp_path / "their"))
    run = _python("pytest", *options, *files, libraries=libraries, seed=seed)
    said = f"{run.stdout[-8000:]}\n{run.stderr[-4000:]}"
    assert run.returncode == 0, said
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", run.stdout, re.MULTILINE)
    assert [one for one in reasons if not any(known in one for known in _WITHOUT)] == [], said


@pytest.mark.timeout(400)
@pytest.mark.skipif(not LONG, reason="the benchmark's parts have tests of their own; all of it takes 20 s: make proofs")
def test_gpu_benchmark_completes_with_graphs(libraries: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    options = ("--device", "cuda", "--quick", "--models", "fp32", "--graphs", "--out", str(out))
    run = _python("bench.gpu", *options, libraries=libraries)
    assert run.returncode == 0, run.stderr
    found = load(out.read_text())
    correct, resnet, bert = found.sections
    assert (resnet.name, bert.name) == ("gpu-resnet50-fp32", "gpu-bert-base-fp32")
    assert not any(section.absent for section in found.sections)
    assert all("with CUDA graphs" in section.how for section in found.sections)
    assert [one.verdict for one in correct.comparisons] == ["reached", "reached"]
    # There is none at a load that no queue keeps up with, which a busy machine may take for 70 %.
    ideal = {"an ideal queue"}
    whos = {"paceline", "run_with_iobinding", "the same with copies", "paceline at 70 %", "the first request"}
    assert {one.who for one in bert.measurements} - ideal == whos
    assert {one.who for one in resnet.measurements} - ideal == {*whos, "paceline, images on the GPU"}


@pytest.mark.timeout(400)
@pytest.mark.skipif(not LONG, reason="the benchmark's parts have tests of their own; all of it takes 40 s: make proofs")
def test_gpu_benchmark_measures_lengths_sequences_and_generations(libraries: Path, tmp_path: Path) -> None:
    parts, out = ("lengths", "sequences", "generations"), tmp_path / "gpu.json"
    options = ("--device", "cuda", "--quick", "--only", ",".join(parts), "--out", str(out))
    run = _python("bench.gpu", *options, libraries=libraries)
    assert run.returncode == 0, run.stderr
    found = load(out.read_text()).sections
    assert [one.name for one in found] == [f"gpu-{part}" for part in parts]
    for section, unit in zip(found, ("texts", "steps", "tokens"), strict=True):
        assert not section.absent
        others = {one.who for one in section.measurements if f"{unit}_per_s" in one.values}
        assert others == {"paceline", *({"run_with_iobinding", "paceline, 1 client"} if unit != "texts" else {EXACT})}
        assert "missed" not in [one.verdict for one in section.comparisons if not one.point]  # answers


def _python(module: str, *arguments: str, libraries: Path, seed: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPO,
        env={**environment, "LD_LIBRARY_PATH": str(libraries), "STAND_IN_SEED": seed},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("config", "seed"), [(GPUS % "", "3"), (f"{GPUS % ''} {GRAPHS}", "")], ids=["plain-random", "graphs-late"]
)
def test_concurrent_clients_get_the_cpus_answers(config: str, seed: str, libraries: Path, tmp_path: Path) -> None:
    with Served(tmp_path, libraries, config, STAND_IN_SEED=seed) as served:
        served.check_concurrently(clients=16, requests=20)
        executions = served.metric("nv_inference_exec_count", model="m", version="1")
        assert executions < 16 * 20, "nobody shared a batch"
        assert not [one for one in served.server.log if one["level"] in ("WARNING", "ERROR")]


def test_model_without_an_instance_group_runs_on_the_gpu_and_the_log_says_so(libraries: Path, tmp_path: Path) -> None:
    with Served(tmp_path, libraries, "max_batch_size: 16") as served:
        served.check(3)
        assert "KIND_AUTO instances run on GPU 0" in served.said
        labels = {"gpu_uuid": UUIDS[0]}
        eventually(lambda: served.metric("nv_gpu_memory_used_bytes", **labels) > 0, "the GPU's memory is told")
        assert served.metric("nv_gpu_memory_total_bytes", **labels) == 2**30
        assert served.metric("nv_gpu_utilization", **labels) == 0.5
        assert served.metric("nv_gpu_power_usage", **labels) == 100


def test_gpu_whose_kernels_take_time_answers_the_same_and_reports_its_utilization(
    libraries: Path, tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    with Served(tmp_path / "models", libraries, GPUS % "", STAND_IN_KERNEL_US=200, STAND_IN_CLOCK=clock) as served:
        busy: list[float] = []

        def some_of_the_time() -> bool:
            served.check_concurrently(clients=8, requests=5)
            busy.append(served.metric("nv_gpu_utilization", gpu_uuid=UUIDS[0]))
            return 0 < busy[-1] <= 1

        eventually(some_of_the_time, "busy")


def test_tuned_configuration_serves_on_the_gpu_as_chosen(libraries: Path, tmp_path: Path) -> None:
    write(tmp_path, "m", "max_batch_size: 2 dynamic_batching { } instance_group { kind: KIND_GPU count: 2 }")
    load = (
        "--clients",
        "4",
        "--rows",
        "2",
        "--requests",
        "400",
        "--no-verify",
        "--format",
        "json",
        "--out",
        str(tmp_path / "chosen"),
    )
    # Each execution's kernels take their time one after the other, whichever instance they are of.
    given = {"LD_LIBRARY_PATH": str(libraries), "STAND_IN_KERNEL_US": "1000", "STAND_IN_IDLE": "1"}
    run = run_command("tune", str(tmp_path / "m"), *load, env=given)
    assert run.returncode == 0, run.stderr
    measured = [f"measuring {what} instances" for what in ("the configured", "1", "3")]
    assert [line for line in run.stderr.splitlines() if line.startswith("measuring")] == measured
    found = json.loads(run.stdout)
    chosen = found["best"][0]
    assert (found["now"]["instances"], found["now"]["gpus"], chosen["max_batch_size"]) == (2, 1, 2)
    with Served(tmp_path / "served", libraries, (tmp_path / "chosen").read_text()) as served:
        served.check(2)
        (group,) = served.stub.ModelConfig(pb.ModelConfigRequest(name="m")).config.instance_group
        assert (group.count, group.kind) == (chosen["instances"], ModelInstanceGroup.KIND_GPU)


def test_libraries_in_the_folders_of_pypi_packages_are_found(libraries: Path, tmp_path: Path) -> None:
    driver, packages = tmp_path / "driver", tmp_path / "site" / "nvidia"
    for library in libraries.glob("*.so.*"):
        name = library.name
        of_driver = name.startswith(("libcuda.", "libnvidia-ml."))
        folder = driver if of_driver else packages / ("cudnn" if "cudnn" in name else "cu13") / "lib"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, folder)
    with Served(tmp_path / "models", driver, GPUS % "", PYTHONPATH=packages.parent) as served:
        served.check(3)
        assert not [one for one in served.server.log if one["level"] in ("WARNING", "ERROR")]


def test_instances_on_two_gpus_share_the_load(libraries: Path, tmp_path: Path) -> None:
    config = f"{GPUS % 'count: 2 gpus: [ 0, 1 ]'} {GRAPHS}"
    with Served(tmp_path, libraries, config, STAND_IN_GPUS=2, STAND_IN_SEED=5) as served:
        served.check_concurrently(clients=16, requests=20)
        for uuid in UUIDS:
            eventually(lambda one=uuid: served.metric("nv_gpu_memory_used_bytes", gpu_uuid=one) > 0, uuid)


def test_request_beyond_the_devices_memory_fails_alone_and_later_ones_are_answered(
    libraries: Path, tmp_path: Path
) -> None:
    # A row takes 512 KiB between the layers, half of it for each of two tensors.
    config = "max_batch_size: 512 dynamic_batching { } instance_group { kind: KIND_GPU }"
    with Served(tmp_path, libraries, config, sizes=(4, 65536, 16), STAND_IN_MEMORY=96 * 2**20) as served:
        served.check(64)
        status, text = served.refused(512)
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "BFCArena" in text
        served.check_concurrently(clients=32, requests=8)
        assert served.metric("paceline_out_of_memory", model="m", version="1") >= 1
        assert served.stub.ServerReady(pb.ServerReadyRequest()).ready


def test_generations_beyond_the_devices_memory_fail_alone(libraries: Path, tmp_path: Path) -> None:
    decoder = replace(TINY, heads=2, kv_heads=2, head_size=128, end_tokens=())
    decoder_models.write(decoder, tmp_path / "d" / "1")
    (tmp_path / "d" / "config.pbtxt").write_text("instance_group { kind: KIND_GPU }")
    # Keys and values of a prompt are 1.6 MiB.
    request = infer("d", {"input_ids": np.arange(400) % 128})
    request.parameters["max_tokens"].int64_param = 12
    with Served(tmp_path, libraries, "instance_group { kind: KIND_CPU }", STAND_IN_MEMORY=48 * 2**20) as served:
        calls = [served.stub.ModelInfer.future(request, timeout=60) for _ in range(12)]
        codes = [call.code() for call in calls]
        assert {*codes} <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}, [call.details() for call in calls]
        assert grpc.StatusCode.OK in codes
        served.stub.ModelInfer(request, timeout=60)


def test_lost_gpu_fails_its_batch_and_then_all_requests(libraries: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    with Served(tmp_path / "models", libraries, GPUS % "", STAND_IN_LOST=lost) as served:
        served.check(2)
        lost.touch()
        assert served.refused(2) == (
            grpc.StatusCode.INTERNAL,
            "model 'm': the NVIDIA driver failed: cuEventSynchronize returned 719 (CUDA_ERROR_LAUNCH_FAILED)",
        )
        eventually(lambda: not served.stub.ServerReady(pb.ServerReadyRequest()).ready, "not ready")
        assert served.refused(2)[0] is grpc.StatusCode.UNAVAILABLE
        assert served.metric("paceline_lost_instances", model="m", version="1") == 1
        assert served.server.terminate() == 0


@pytest.mark.parametrize("config", [GPUS % "", f"{GPUS % ''} {GRAPHS}"], ids=["plain", "graphs"])
def test_model_whose_gpu_is_lost_while_idle_is_unloaded_and_others_keep_serving(
    config: str, libraries: Path, tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    write(tmp_path / "models", "idle", config)
    with Served(tmp_path / "models", libraries, "instance_group { kind: KIND_CPU }", STAND_IN_LOST=lost) as served:
        served.check(2, name="idle")
        lost.touch()
        served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="idle"), timeout=60)
        served.check(2)
        assert served.server.terminate() == 0


def test_gpu_that_hangs_while_its_model_is_unloaded_blocks_no_other_model(libraries: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    write(tmp_path / "models", "other", GPUS % "gpus: 1")
    write(tmp_path / "models", "idle", GPUS % "gpus: 0")
    config = "instance_group { kind: KIND_CPU }"
    with Served(tmp_path / "models", libraries, config, STAND_IN_GPUS=2, STAND_IN_HANG=hangs) as served:
        served.check(2, name="idle")
        hangs.touch()
        served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="idle"), timeout=60)
        for _ in range(20):
            served.check(2)
            served.check(2, name="other")
        served.server.terminate()


def test_gpu_that_hangs_inside_the_driver_stops_only_what_needs_it(libraries: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    limit = 'parameters { key: "paceline.execution_timeout_ms" value { string_value: "1500" } }'
    for name, config in (("limited", f"{GPUS % ''} {limit}"), ("other", GPUS % "")):
        write(tmp_path / "models", name, config)
    config, locked = "instance_group { kind: KIND_CPU }", {"STAND_IN_HANG": hangs, "STAND_IN_HANG_LOCKED": 1}
    with Served(tmp_path / "models", libraries, config, **locked) as served:
        for name in ("limited", "other"):
            served.check(2, name=name)
        hangs.touch()
        with pytest.raises(grpc.RpcError, match="and was given up"):
            served.check(2, name="limited")
        request = infer("other", {"INPUT0": np.zeros((2, 64), np.float32)})
        waiting = [served.stub.ModelInfer.future(request, timeout=60) for _ in range(4)]
        for _ in range(20):
            assert served.stub.ServerLive(pb.ServerLiveRequest(), timeout=10).live
            served.check(2)
        assert not any(one.done() for one in waiting)
        hangs.unlink()
        assert all(len(one.result(timeout=60).raw_output_contents[0]) == 2 * 16 * 4 for one in waiting)
        served.check(2, name="other")


def test_buffers_for_outputs_of_open_size_are_not_kept(libraries: Path, tmp_path: Path) -> None:
    node = models.helper.make_node("Neg", ["INPUT0"], ["OUTPUT0"])
    tensors = [models.tensor(name, "FP32", ["batch", "n"]) for name in ("INPUT0", "OUTPUT0")]
    models.write(models.model([node], tensors[:1], tensors[1:]), tmp_path / "open" / "1" / "model.onnx")
    (tmp_path / "open" / "config.pbtxt").write_text(GPUS % "")
    with Served(tmp_path, libraries, "instance_group { kind: KIND_CPU }", STAND_IN_MEMORY=50 * 2**20) as served:
        for number in range(40):
            given = np.full((1, 400_000 + number), number, np.float32)
            answer = served.stub.ModelInfer(infer("open", {"INPUT0": given}), timeout=60)
            assert answer.raw_output_contents[0] == (-given).tobytes()


def test_arena_shrinkage_on_the_gpu_does_not_disturb_concurrent_clients(libraries: Path, tmp_path: Path) -> None:
    shrinks = 'parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "gpu:0" } }'
    config = f"max_batch_size: 128 instance_group {{ kind: KIND_GPU }} {shrinks}"
    with Served(tmp_path, libraries, config, sizes=(64, 2048, 16)) as served:
        served.check_concurrently(clients=8, requests=20)
        assert not [one for one in served.server.log if one["level"] in ("WARNING", "ERROR")]


def test_options_of_the_cuda_accelerator_are_those_of_onnxruntime(libraries: Path) -> None:
    source = """
import onnxruntime as ort
from paceline.backends.onnx.provider_options import _CUDA
from paceline.backends.onnx.sessions import PROBE_MODEL
ort.set_default_logger_severity(4)
texts = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "DEFAULT"}
made = ort.SessionOptions()
made.log_severity_level = 4
for name in _CUDA:
    given = {name: texts.get(name, "1")}
    session = ort.InferenceSession(PROBE_MODEL, made, [("CUDAExecutionProvider", given), "CPUExecutionProvider"])
    assert session.get_providers()[0] == "CUDAExecutionProvider", name
    told = session.get_provider_options()["CUDAExecutionProvider"]
    if told.get(name) != given[name]:
        print(name, told.get(name))
# Those of addresses, and what we say ourselves.
print(*sorted(one for one in told if one not in _CUDA))
"""
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    run = subprocess.run([sys.executable, "-c", source], cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "enable_skip_layer_norm_strict_mode None",
        "device_id external_data_loader_reading_threads gpu_external_alloc gpu_external_empty_cache gpu_external_free "
        "has_user_compute_stream user_compute_stream",
    ]
