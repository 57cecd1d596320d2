"""ONNX models on a GPU in their own processes, on the stand-in (`tests/cuda/stand_in.py`): a lost context belongs to
that process, and the next process has another."""

from __future__ import annotations

from pathlib import Path

import grpc

from paceline.protos import inference_pb2 as pb
from tests.integration.stand_in_server import GPUS, Served, libraries
from tests.polling import eventually

__all__ = ["libraries"]

OWN = f'{GPUS % ""} parameters {{ key: "paceline.own_process" value {{ string_value: "true" }} }}'


def test_concurrent_clients_get_the_cpus_answers(libraries: Path, tmp_path: Path) -> None:
    with Served(tmp_path, libraries, OWN, STAND_IN_SEED=3) as served:
        served.check_concurrently(clients=16, requests=10)
        executions = served.metric("nv_inference_exec_count", model="m", version="1")
        assert executions < 16 * 10, "nobody shared a batch"
        assert not [one for one in served.server.log if one["level"] in ("WARNING", "ERROR")]


def test_lost_gpu_serves_again_once_it_is_back_without_a_server_restart(libraries: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    with Served(tmp_path / "models", libraries, OWN, STAND_IN_LOST=lost) as served:
        served.check(2)
        lost.touch()
        status, text = served.refused(2)
        assert status is grpc.StatusCode.INTERNAL
        assert "CUDA" in text
        eventually(lambda: not served.stub.ServerReady(pb.ServerReadyRequest()).ready, "not ready")
        assert served.stub.ServerLive(pb.ServerLiveRequest()).live
        lost.unlink()
        eventually(lambda: served.stub.ServerReady(pb.ServerReadyRequest()).ready, "another process")
        served.check_concurrently(clients=4, requests=5)
        assert served.server.terminate() == 0


def test_request_beyond_the_devices_memory_fails_alone_and_later_ones_are_answered(
    libraries: Path, tmp_path: Path
) -> None:
    # A row takes 512 KiB between the layers, half of it for each of two tensors.
    config = OWN.replace("max_batch_size: 16", "max_batch_size: 512")
    with Served(tmp_path, libraries, config, sizes=(4, 65536, 16), STAND_IN_MEMORY=96 * 2**20) as served:
        served.check(64)
        status, text = served.refused(512)
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "BFCArena" in text
        served.check_concurrently(clients=32, requests=4)
        assert served.metric("paceline_out_of_memory", model="m", version="1") >= 1
        assert served.metric("paceline_lost_instances", model="m", version="1") == 0
