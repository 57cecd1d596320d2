"""Credentials appear nowhere: not in logs, traces, metrics, models' environments or error messages."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.rpc.credentials import line_of
from tests.harness import ServerProcess, write_identity
from tests.polling import eventually
from tests.wire import infer, rows_of_floats

TOKEN, WRONG, KEY, WRONG_KEY = "tok-5e1f-good", "tok-77aa-wrong", "key-9b2c-good", "key-41dd-wrong"
MODEL = """
import os

print(dict(os.environ))


class Model:
    inputs = outputs = {"x": ("FP32", [-1, 1])}

    def execute(self, inputs):
        return inputs
"""
HEADER = "triton-grpc-protocol-admin"


@pytest.mark.usefixtures("frontends")
def test_secrets_are_not_in_logs_traces_or_metrics(tmp_path: Path) -> None:
    """At the most verbose level, with headers forwarded, requests traced, and good and bad tokens."""
    write_identity(tmp_path / "models")
    tokens, traces = tmp_path / "tokens", tmp_path / "traces"
    tokens.write_text(line_of("edge", TOKEN))
    args = [
        "--log-level=debug",
        f"--grpc-token-file={tokens}",
        f"--grpc-restricted-protocol=metadata:admin={KEY}",
        "--grpc-header-forward-pattern=.*",
        f"--trace-config=file={traces}",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=1",
    ]
    good = [("authorization", f"Bearer {TOKEN}"), (HEADER, KEY)]
    with ServerProcess(tmp_path / "models", args=args) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = infer("echo", {"INPUT0": rows_of_floats(1, 16)}, id="one")
        assert stub.ModelInfer(request, metadata=good, timeout=20).id == "one"
        assert stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=good, timeout=20).name == "paceline"
        for headers in ([("authorization", f"Bearer {WRONG}")], [good[0], (HEADER, WRONG_KEY)]):
            with pytest.raises(grpc.RpcError) as refusal:
                stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=headers, timeout=20)
            assert not any(secret in str(refusal.value) for secret in (TOKEN, WRONG, KEY, WRONG_KEY))
        request.inputs[0].datatype = "INT32"
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(request, metadata=good, timeout=20)
        broken = tokens.with_name("broken")
        broken.write_text(f"{TOKEN}\n")
        broken.replace(tokens)  # somebody's mistake, which is reported
        eventually(lambda: _asked_and_reported(stub, good, server), "a line about the broken file")
        metrics = "".join(server.metrics())
        server.terminate()
        said = "".join(server.stderr)
    everything = said + traces.read_text() + metrics
    assert "one" in traces.read_text()
    assert "the token file can't be reloaded" in said
    for secret in (TOKEN, WRONG, KEY, WRONG_KEY):
        assert secret not in everything
        assert hashlib.sha256(secret.encode()).hexdigest() not in everything


def _asked_and_reported(stub: Any, headers: Any, server: ServerProcess) -> bool:
    stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=headers, timeout=20)
    return any("the token file can't be reloaded" in line["message"] for line in server.log)


def test_secrets_in_the_servers_environment_are_not_passed_to_models(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    env = {
        "PACELINE_GRPC_RESTRICTED_PROTOCOL": f"metadata:admin={KEY}",
        "PACELINE_CLIENT_TOKEN": TOKEN,
        "OF_THE_MODEL": "weights-in-a-bucket",
    }
    with ServerProcess(tmp_path, args=["--allow-python-models=true"], env=env) as server:
        server.terminate()  # by then, all that the model has printed is in the log
        said = "".join(server.stderr)
    assert "weights-in-a-bucket" in said
    assert KEY not in said
    assert TOKEN not in said
    assert "PACELINE_" not in said


def test_secrets_in_invalid_flags_are_not_printed(tmp_path: Path) -> None:
    write_identity(tmp_path)
    server = ServerProcess(tmp_path, args=[f"--grpc-restricted-protocol=everything:admin={KEY}"])
    server.start()
    assert server.wait() == 2
    server.kill()
    assert "expected groups among" in "".join(server.stderr)
    assert KEY not in "".join(server.stderr)
