"""NVIDIA's client against a server that requires TLS and tokens and restricts RPCs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from paceline.server.rpc.credentials import line_of
from tests.certificates import Authority, Pair
from tests.harness import ServerProcess, write_identity

pytestmark = pytest.mark.usefixtures("frontends")

HEADERS = {"authorization": "Bearer good", "triton-grpc-protocol-infer-key": "infer-value"}


def test_client_needs_certificate_token_and_key_to_infer(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_identity(models)
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    server_pair, own, strange = ours.sign("server"), ours.sign("client"), others.sign("stranger")
    tokens = tmp_path / "tokens"
    tokens.write_text(line_of("edge", "good"))
    args = [
        *("--grpc-use-ssl-mutual", "true", "--grpc-root-cert", str(ours.roots)),
        *("--grpc-server-cert", str(server_pair.certificate), "--grpc-server-key", str(server_pair.key)),
        *("--grpc-token-file", str(tokens), "--grpc-restricted-protocol", "inference:infer-key=infer-value"),
    ]
    sent = np.arange(16, dtype=np.float32).reshape(1, 16)
    tensor = triton.InferInput("INPUT0", [1, 16], "FP32")
    tensor.set_data_from_numpy(sent)
    with ServerProcess(models, args=args) as server:

        def client(pair: Pair = own) -> triton.InferenceServerClient:
            return triton.InferenceServerClient(
                server.target,
                ssl=True,
                root_certificates=str(ours.roots),
                private_key=str(pair.key),
                certificate_chain=str(pair.certificate),
            )

        with client() as trusted:
            assert trusted.is_server_live()
            answer = trusted.infer("echo", [tensor], headers=HEADERS)
            assert np.array_equal(answer.as_numpy("OUTPUT0"), sent)
            with pytest.raises(InferenceServerException, match=r"StatusCode\.UNAUTHENTICATED"):
                trusted.infer("echo", [tensor])
            lacking = {"authorization": HEADERS["authorization"]}
            with pytest.raises(
                InferenceServerException,
                match="This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'",
            ):
                trusted.infer("echo", [tensor], headers=lacking)
            assert trusted.get_model_metadata("echo", headers=lacking).name == "echo"
        with client(strange) as stranger, pytest.raises(InferenceServerException, match=r"StatusCode\.UNAVAILABLE"):
            stranger.infer("echo", [tensor], headers=HEADERS, client_timeout=60)
