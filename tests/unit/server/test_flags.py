"""The flags of `serve`, given on the command line and in the environment, and the settings that they become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paceline.server.cli import _settings, serve
from paceline.server.models.upstream_settings import TRACING_HEADERS
from tests.harness import REPO

DEFAULTS = {
    "model_repository": (),
    "cache_config": (),
    "grpc_address": "0.0.0.0",
    "grpc_port": 8001,
    "grpc_socket_mode": 0o600,
    "grpc_max_stream_requests": 1024,
    "grpc_message_timeout_secs": 300.0,
    "grpc_header_forward_pattern": "",
    "grpc_infer_response_compression_level": "none",
    "grpc_use_ssl": False,
    "grpc_use_ssl_mutual": False,
    "grpc_server_cert": None,
    "grpc_server_key": None,
    "grpc_root_cert": None,
    "grpc_token_file": None,
    "grpc_restricted_protocol": (),
    "grpc_max_message_bytes": 2**31 - 1,
    "grpc_max_metadata_bytes": 16_384,
    "max_request_elements": 1_048_576,
    "grpc_max_concurrent_rpcs": 16_384,
    "grpc_max_connections": 8_192,
    "grpc_max_connection_calls": 16_384,
    "grpc_max_streams": 1_024,
    "max_queued_requests": 65_536,
    "max_queued_bytes": 4 * 2**30,
    "max_models": 1_024,
    "grpc_keepalive_time": 7_200_000,
    "grpc_keepalive_timeout": 20_000,
    "grpc_keepalive_permit_without_calls": False,
    "grpc_http2_max_pings_without_data": 2,
    "grpc_http2_min_recv_ping_interval_without_data": 300_000,
    "grpc_http2_max_ping_strikes": 2,
    "grpc_max_connection_idle": 0,
    "grpc_max_connection_age": 0,
    "grpc_max_connection_age_grace": 0,
    "frontends": 1,
    "frontend_memory_mb": 1024,
    "frontend_timeout_secs": 30,
    "allow_metrics": True,
    "allow_gpu_metrics": True,
    "metrics_address": None,
    "metrics_port": 8002,
    "status_page": False,
    "allow_client_shm": False,
    "max_client_shm_regions": 256,
    "drain_grace_secs": 0.0,
    "exit_timeout_secs": 30.0,
    "execution_timeout_secs": 0.0,
    "exit_on_error": False,
    "strict_readiness": True,
    "model_control_mode": "none",
    "repository_poll_secs": 15.0,
    "load_model": (),
    "model_load_thread_count": 4,
    "model_load_retry_count": 0,
    "backend_config": (),
    "disable_auto_complete_config": False,
    "model_config_name": "",
    "model_name": "",
    "allow_op_libraries": False,
    "allow_python_models": False,
    "allow_remote_settings": False,
    "trace_config": (),
    "max_batch_size": None,
    "max_queue_delay_microseconds": None,
    "max_latency": None,
    "max_batch_time": None,
    "timeout": None,
    "upstream": None,
    "upstream_model": (),
    "upstream_unbatched": (),
    "upstream_batches": 2,
    "upstream_calls": 32,
    "upstream_connections": 1,
    "upstream_timeout_secs": 300.0,
    "upstream_health_secs": 1.0,
    "upstream_header": (),
    "upstream_trace_header": TRACING_HEADERS,
    "upstream_use_ssl": False,
    "upstream_root_cert": None,
    "upstream_client_cert": None,
    "upstream_client_key": None,
    "upstream_server_name": None,
    "upstream_token_file": None,
    "id": "paceline",
    "log_level": "info",
    "log_format": "text",
}

GIVEN: list[tuple[str, str, object]] = [
    ("grpc-address", "::1", "::1"),
    ("grpc-address", "unix:/run/p.sock", "unix:/run/p.sock"),
    ("grpc-port", "0", 0),
    ("grpc-socket-mode", "660", 0o660),
    ("grpc-socket-mode", "0666", 0o666),
    ("grpc-port", "65535", 65535),
    ("grpc-max-stream-requests", "1", 1),
    ("grpc-header-forward-pattern", "^x-", "^x-"),
    ("grpc-infer-response-compression-level", "high", "high"),
    ("frontends", "4", 4),
    ("frontend-memory-mb", "64", 64),
    ("frontend-timeout-secs", "0", 0),
    ("grpc-use-ssl", "true", True),
    ("grpc-use-ssl-mutual", "1", True),
    ("grpc-server-cert", "a.crt", Path("a.crt")),
    ("grpc-token-file", "tokens", Path("tokens")),
    ("grpc-restricted-protocol", "health:k=v", ("health:k=v",)),
    ("grpc-max-message-bytes", "1", 1),
    ("max-queued-bytes", "10000000000", 10**10),
    ("grpc-keepalive-permit-without-calls", "1", True),
    ("grpc-http2-max-ping-strikes", "0", 0),
    ("grpc-max-connections", "100", 100),
    ("grpc-max-connection-calls", "100", 100),
    ("grpc-max-connection-idle", "5000", 5000),
    ("grpc-max-connection-age", "5000", 5000),
    ("allow-metrics", "false", False),
    ("allow-gpu-metrics", "false", False),
    ("allow-metrics", "1", True),
    ("metrics-address", "127.0.0.1", "127.0.0.1"),
    ("metrics-port", "9", 9),
    ("status-page", "true", True),
    ("allow-client-shm", "true", True),
    ("max-client-shm-regions", "1", 1),
    ("drain-grace-secs", "2.5", 2.5),
    ("exit-timeout-secs", "0", 0.0),
    ("exit-timeout-secs", "2.5", 2.5),
    ("execution-timeout-secs", "90", 90.0),
    ("exit-on-error", "true", True),
    ("strict-readiness", "false", False),
    ("model-control-mode", "poll", "poll"),
    ("model-control-mode", "explicit", "explicit"),
    ("repository-poll-secs", "0.5", 0.5),
    ("load-model", "resnet", ("resnet",)),
    ("model-load-thread-count", "1", 1),
    ("model-load-retry-count", "3", 3),
    ("max-batch-size", "7", 7),
    ("model-config-name", "edge", "edge"),
    ("upstream", "localhost:9000", "localhost:9000"),
    ("upstream", "[::1]:9000", "[::1]:9000"),
    ("upstream", "dns:///models:9000", "dns:///models:9000"),
    ("upstream-model", "resnet", ("resnet",)),
    ("upstream-unbatched", "resnet", ("resnet",)),
    ("upstream-batches", "4", 4),
    ("upstream-calls", "1", 1),
    ("upstream-connections", "3", 3),
    ("upstream-timeout-secs", "0.5", 0.5),
    ("upstream-health-secs", "10", 10.0),
    ("upstream-header", "x-tenant", ("x-tenant",)),
    ("upstream-trace-header", "x-trace", ("x-trace",)),
    ("upstream-use-ssl", "true", True),
    ("upstream-root-cert", "ca.crt", Path("ca.crt")),
    ("upstream-client-cert", "own.crt", Path("own.crt")),
    ("upstream-client-key", "own.key", Path("own.key")),
    ("upstream-server-name", "models.example", "models.example"),
    ("upstream-token-file", "token", Path("token")),
    ("model-name", "resnet", "resnet"),
    ("cache-config", "local,size=1048576", ("local,size=1048576",)),
    ("allow-op-libraries", "true", True),
    ("allow-python-models", "true", True),
    ("allow-remote-settings", "true", True),
    ("id", "edge 7", "edge 7"),
    ("log-level", "debug", "debug"),
    ("log-format", "json", "json"),
]


def parsed(*arguments: str, **environment: str) -> dict[str, Any]:
    """The parameters that `serve` would get."""
    runner = CliRunner(env={"PACELINE_" + key: value for key, value in environment.items()})
    with runner.isolation(env=runner.env):
        context: click.Context = serve.make_context("serve", list(arguments), auto_envvar_prefix="PACELINE")
    return context.params


def variable(flag: str) -> str:
    return flag.upper().replace("-", "_")


def test_flags_have_tritons_defaults_where_triton_has_the_flag() -> None:
    assert parsed("models") == {**DEFAULTS, "paths": (Path("models"),)}


@pytest.mark.parametrize(("flag", "text", "value"), GIVEN)
def test_flag_is_read_with_or_without_equals_sign(flag: str, text: str, value: object) -> None:
    name = flag.replace("-", "_")
    assert parsed(f"--{flag}", text)[name] == parsed(f"--{flag}={text}")[name] == value


@pytest.mark.parametrize(("flag", "text", "value"), GIVEN)
def test_flag_is_read_from_the_environment(flag: str, text: str, value: object) -> None:
    assert parsed(**{variable(flag): text})[flag.replace("-", "_")] == value


@pytest.mark.parametrize("flag", sorted({name.replace("_", "-") for name in DEFAULTS} - {"model-repository"}))
def test_flag_empty_in_the_environment_counts_as_not_given(flag: str) -> None:
    name = flag.replace("-", "_")
    assert parsed(**{variable(flag): ""})[name] == DEFAULTS[name]


def test_flag_on_the_command_line_overrules_the_environment() -> None:
    assert parsed("--grpc-port", "1", GRPC_PORT="2")["grpc_port"] == 1


@pytest.mark.parametrize("flag", ["--model-repository", "--model-store"])
def test_model_repository_may_be_repeated_and_combined_with_paths(flag: str) -> None:
    found = parsed("c", flag, "a", f"{flag}=b")
    assert (found["paths"], found["model_repository"]) == ((Path("c"),), (Path("a"), Path("b")))


def test_model_repository_in_the_environment_may_list_several() -> None:
    found = parsed(MODEL_REPOSITORY=os.pathsep.join(["a", "b"]))
    assert found["model_repository"] == (Path("a"), Path("b"))


def test_load_model_may_be_given_several_times() -> None:
    assert parsed("--load-model", "a", "--load-model=b")["load_model"] == ("a", "b")
    assert parsed(LOAD_MODEL="a b")["load_model"] == ("a", "b")


def test_backend_config_may_be_given_several_times() -> None:
    given = ["onnxruntime,default-max-batch-size=4", "onnxruntime,intra_op_thread_count=2"]
    assert parsed(*(f"--backend-config={one}" for one in given))["backend_config"] == tuple(given)
    assert parsed(BACKEND_CONFIG=" ".join(given))["backend_config"] == tuple(given)


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("grpc-restricted-protocol", ["inference,health:k=my secret", "trace:a=b,c:d"]),
        ("load-model", ["my model", "other"]),
        ("backend-config", ["onnxruntime,cache-directory=/my cache"]),
        ("trace-config", ["file=/my traces/t.json", "level=TIMESTAMPS"]),
        ("upstream-header", ["x-a", "x-b"]),
        ("model-repository", [Path("/my models:1"), Path("b")]),
    ],
)
@pytest.mark.parametrize("lines", ["{}\n", "\n  {}  \n\n", "{}\r\n"], ids=["plain", "indented", "crlf"])
def test_repeatable_flag_in_environment_takes_lines(flag: str, values: list[object], lines: str) -> None:
    found = parsed(**{variable(flag): "".join(map(lines.format, values))})
    assert found[flag.replace("-", "_")] == tuple(values)


@pytest.mark.parametrize("flag", ["load-model", "upstream-trace-header", "model-repository"])
def test_repeatable_flag_of_blank_lines_is_not_given(flag: str) -> None:
    name = flag.replace("-", "_")
    assert parsed(**{variable(flag): " \n\n"})[name] == DEFAULTS[name]


def test_every_flag_becomes_a_setting() -> None:
    read: set[str] = set()

    class Watched(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)

    flags = parsed(str(REPO))
    given = {key: value for key, value in flags.items() if key != "paths" and not key.startswith("upstream_")}
    _settings((REPO,), Watched(given))
    assert set(given) - read == {"log_level", "log_format"}, "which are for the log"


def test_flags_about_batches_name_their_fields() -> None:
    flags = parsed("--max-batch-size", "4", "--max-latency", "5", "--timeout", "0", "m")
    given = {key: value for key, value in flags.items() if key != "paths"}
    assert _settings((REPO,), given).batching.flags == (
        ("--max-batch-size", "max_batch_size"),
        ("--max-latency", "dynamic_batching.max_queue_delay_microseconds"),
        ("--timeout", "dynamic_batching.default_queue_policy.default_timeout_microseconds"),
    )
    assert _settings((REPO,), {key: value for key, value in parsed("m").items() if key != "paths"}).batching.flags == ()


def test_disable_auto_complete_config_takes_no_value() -> None:
    found = parsed("--disable-auto-complete-config", "models")
    assert (found["disable_auto_complete_config"], found["paths"]) == (True, (Path("models"),))
    assert parsed(DISABLE_AUTO_COMPLETE_CONFIG="true")["disable_auto_complete_config"] is True
