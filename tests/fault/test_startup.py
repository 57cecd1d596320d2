"""A server that can't start says why, in one line, and ends with a status other than 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.fault.traffic import connected, request
from tests.harness import REPO, ServerProcess, write_identity
from tests.ports import free_port

IN_USE = "Address already in use; is another server running? --grpc-port and --metrics-port choose other ports"


def failed_start(*paths: Path | str, args: tuple[str, ...] = (), env: dict[str, str] | None = None) -> str:
    """What follows `Error: ` in the only line that isn't a log line; there is no traceback."""
    server = ServerProcess(*paths, args=args, env=env)
    server.start()
    try:
        assert server.wait(30) == 1
    finally:
        server.kill()
    lines = [line.rstrip("\n") for line in server.stderr if not line.startswith("{")]
    assert len(lines) == 1, lines
    assert not [record for record in server.log if "exception" in record]
    assert lines[0].startswith("Error: ")
    return lines[0].removeprefix("Error: ")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_start_with_a_corrupt_bare_file_names_the_model_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"this is no model")
    text = failed_start(tmp_path / "broken.onnx")
    assert text.startswith("failed to load model 'broken': can't open ")
    assert "onnx runtime error" in text


def test_start_with_an_empty_model_file_says_that_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"")
    assert failed_start(tmp_path / "broken.onnx") == (
        f"failed to load model 'broken': the file is empty: '{tmp_path}/broken.onnx'"
    )


def test_start_with_a_truncated_model_names_the_model_and_the_reason(tmp_path: Path) -> None:
    whole = models.mlp().SerializeToString()
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(whole[: len(whole) // 2])
    assert failed_start(tmp_path).startswith("failed to load model 'm': can't open ")


def test_start_with_an_empty_repository_says_what_was_expected(tmp_path: Path) -> None:
    assert failed_start(tmp_path) == (
        f"{tmp_path}: no models here; expected a model repository (<model>/<version>/model.onnx), one model's folder "
        "or a .onnx file"
    )


def test_start_with_a_missing_path_reports_it_before_a_taken_port(tmp_path: Path, taken_port: int) -> None:
    text = failed_start(tmp_path / "nowhere", args=("--metrics-port", str(taken_port)))
    assert text == f"{tmp_path}/nowhere: No such file or directory"


def test_start_with_a_file_of_another_kind_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert failed_start(tmp_path / "notes.txt") == f"{tmp_path}/notes.txt: expected a .onnx file or a folder"


def test_start_with_an_unreadable_folder_reports_it(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("permissions don't bind root; tests/unit/server/models/test_layout.py drops its privileges instead")
    (tmp_path / "locked").mkdir(mode=0)
    assert failed_start(tmp_path / "locked") == f"{tmp_path}/locked: Permission denied"


def test_start_with_a_model_in_two_repositories_names_both(tmp_path: Path) -> None:
    one, two = write_identity(tmp_path / "one"), write_identity(tmp_path / "two")
    assert failed_start(tmp_path / "one", tmp_path / "two") == (
        f"failed to load model 'echo': model appears in two or more repositories: {one}, {two}"
    )


def without_dims(folder: Path) -> str:
    (folder / "config.pbtxt").write_text('backend: "identity" max_batch_size: 8')
    return "model 'echo': backend 'identity' needs the inputs and outputs in the configuration, each with its data_type"


def with_a_fault_in_line_two(folder: Path) -> str:
    (folder / "config.pbtxt").write_text('backend: "identity"\nmax_batchsize: 8')
    what = 'Message type "inference.ModelConfig" has no field named "max_batchsize". Did you mean max_batch_size?'
    return f"model 'echo': {folder}/config.pbtxt:2:1 : {what}"


def with_unknown_backend(folder: Path) -> str:
    (folder / "config.pbtxt").write_text('backend: "tensorrt"')
    known = "expected one of identity, onnxruntime, python"
    end = "which this build doesn't have; as platform, expected onnxruntime_onnx"
    return f"model 'echo': backend: {known}, got 'tensorrt', {end}"


def without_versions(folder: Path) -> str:
    (folder / "1").rmdir()
    return f"model 'echo': no version to load: expected folders named by version numbers in {folder}, found none"


@pytest.mark.parametrize("spoil", [without_dims, with_a_fault_in_line_two, with_unknown_backend, without_versions])
def test_start_with_no_loadable_model_reports_why(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    expected = spoil(write_identity(tmp_path))
    assert failed_start(tmp_path) == f"failed to load {expected}"


def test_start_with_several_unloadable_models_names_each_in_one_line(tmp_path: Path) -> None:
    without_dims(write_identity(tmp_path, "a"))
    without_dims(write_identity(tmp_path, "b"))
    text = failed_start(tmp_path)
    assert "model 'a': backend" in text
    assert "; model 'b': backend" in text


def test_start_with_exit_on_error_and_one_bad_model_of_two_ends(tmp_path: Path) -> None:
    write_identity(tmp_path, "good")
    with_unknown_backend(write_identity(tmp_path, "bad"))
    text = failed_start(tmp_path, args=("--exit-on-error", "true"))
    assert text.startswith("failed to load model 'bad': backend: ")
    assert "good" not in text


def test_start_with_the_grpc_port_in_use_reports_it_before_loading(tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"never looked at")
    text = failed_start(tmp_path / "broken.onnx", args=("--grpc-port", str(taken_port)))
    assert text == f"gRPC can't listen on 127.0.0.1:{taken_port}: {IN_USE}"


def test_start_with_the_metrics_port_in_use_reports_it_before_loading(tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"never looked at")
    text = failed_start(tmp_path / "broken.onnx", args=("--metrics-port", str(taken_port)))
    assert text == f"metrics can't listen on 127.0.0.1:{taken_port}: {IN_USE}"


def test_start_with_one_port_for_both_reports_it_before_loading(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"never looked at")
    free = str(free_port())
    text = failed_start(tmp_path / "broken.onnx", args=("--grpc-port", free, "--metrics-port", free))
    assert text == f"gRPC can't listen on 127.0.0.1:{free}: {IN_USE}"


@pytest.mark.parametrize("flag", ["--grpc-address", "--metrics-address"])
def test_start_on_an_address_that_is_not_ours_reports_it(tmp_path: Path, flag: str) -> None:
    write_identity(tmp_path)
    text = failed_start(tmp_path, args=(flag, "192.0.2.1"))  # reserved for documentation: nobody has it
    assert text.endswith(" can't listen on 192.0.2.1:0: Cannot assign requested address")


@pytest.mark.parametrize(("closed", "number", "frontends"), [("<&-", 0, "1"), (">&-", 1, "2")])
def test_start_with_a_closed_standard_stream_opens_dev_null_in_its_place(
    tmp_path: Path, closed: str, number: int, frontends: str
) -> None:
    write_identity(tmp_path)
    program = ("/bin/sh", "-c", f'exec "{sys.executable}" -m paceline "$@" {closed}', "sh")
    with ServerProcess(tmp_path, program=program, args=["--frontends", frontends]) as server:
        assert os.readlink(f"/proc/{server.pid}/fd/{number}") == os.devnull
        with connected(server) as client:
            assert client.code(request()) is grpc.StatusCode.OK
        assert server.terminate() == 0
        assert not [line for line in server.stderr if not line.startswith("{")]


def test_start_without_any_standard_stream_opens_dev_null_and_serves(tmp_path: Path) -> None:
    write_identity(tmp_path)
    port = free_port()
    command = f'exec "{sys.executable}" -m paceline serve "$0" --grpc-port {port} --allow-metrics false <&- >&- 2>&-'
    with subprocess.Popen(["/bin/sh", "-c", command, str(tmp_path)], cwd=REPO) as server:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                assert stub.ModelInfer(request(), timeout=60, wait_for_ready=True).outputs
            assert [os.readlink(f"/proc/{server.pid}/fd/{number}") for number in range(3)] == [os.devnull] * 3
            server.terminate()
            assert server.wait(30) == 0
        finally:
            server.kill()


def test_failed_start_without_any_standard_stream_exits_with_status_1(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -m paceline serve "$0" <&- >&- 2>&-', str(tmp_path / "nowhere")],
        cwd=REPO,
        check=False,
    )
    assert done.returncode == 1


def test_start_with_settings_only_in_the_environment_reads_them(tmp_path: Path) -> None:
    env = {"PACELINE_MODEL_REPOSITORY": str(tmp_path / "nowhere")}
    assert failed_start(env=env) == f"{tmp_path}/nowhere: No such file or directory"


def test_packages_for_another_protobuf_are_told(tmp_path: Path) -> None:
    package = tmp_path / "grpc_health" / "v1"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "health_pb2.py").write_text(
        "from google.protobuf import runtime_version as v\n"
        "v.ValidateProtobufRuntimeVersion(v.Domain.PUBLIC, 99, 0, 0, '', 'grpc_health/v1/health.proto')\n"
    )
    (package / "health_pb2_grpc.py").write_text("from grpc_health.v1 import health_pb2\n")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "models"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith("Error: installed packages need different versions of protobuf: name paceline and")
