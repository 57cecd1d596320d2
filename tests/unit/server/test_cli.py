"""The command's flags and their environment variables, and the errors for wrong ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from paceline.server.cli import _settings, main, serve
from paceline.server.flags import Flag, Section
from paceline.server.models.upstream_settings import TRACING_HEADERS
from paceline.server.rpc.credentials import Tokens
from tests.harness import REPO

DEFAULTS = {
    "model_repository": (),
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


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments], env={f"PACELINE_{k}": v for k, v in environment.items()})


def variable(flag: str) -> str:
    return flag.upper().replace("-", "_")


def test_flags_have_tritons_defaults_where_triton_has_the_flag() -> None:
    assert parsed("models") == {**DEFAULTS, "paths": (Path("models"),)}


@pytest.mark.parametrize(("flag", "text", "value"), GIVEN)
def test_flag_is_read_from_the_command_line_with_and_without_equals_sign(flag: str, text: str, value: object) -> None:
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


def test_load_model_may_be_repeated_and_list_several_in_the_environment() -> None:
    assert parsed("--load-model", "a", "--load-model=b")["load_model"] == ("a", "b")
    assert parsed(LOAD_MODEL="a b")["load_model"] == ("a", "b")


def test_backend_config_may_be_repeated_and_list_several_in_the_environment() -> None:
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
def test_repeatable_flag_in_the_environment_may_have_a_line_for_each_value(
    flag: str, values: list[object], lines: str
) -> None:
    found = parsed(**{variable(flag): "".join(map(lines.format, values))})
    assert found[flag.replace("-", "_")] == tuple(values)


@pytest.mark.parametrize("flag", ["load-model", "upstream-trace-header", "model-repository"])
def test_repeatable_flag_of_blank_lines_in_the_environment_counts_as_not_given(flag: str) -> None:
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


def test_flags_about_batches_are_known_by_the_fields_that_say_the_same() -> None:
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


def shown_flags(asked: str) -> list[str]:
    """The first spelling of each flag that a help shows, in its order, without those that show help."""
    result = CliRunner().invoke(main, ["serve", asked])
    assert result.exit_code == 0
    introduction, *sections = re.split(r"^\S.*:\n", result.output, flags=re.MULTILINE)
    assert "such as --grpc-port by PACELINE_GRPC_PORT" in " ".join(introduction.split())
    return re.findall(r"^  (--(?!help)[\w-]+)", "".join(sections), re.MULTILINE)


def test_help_shows_the_ten_most_common_flags() -> None:
    shown = shown_flags("--help")
    assert shown[0] == "--model-name"
    assert {"--max-batch-size", "--grpc-port", "--metrics-port"} <= set(shown)
    assert len(shown) == 10


def test_help_all_shows_each_flag_by_section() -> None:
    flags = [each for each in serve.params if isinstance(each, Flag)]
    assert shown_flags("--help-all") == [
        each.opts[0] for section in Section for each in flags if each.section is section
    ]
    text = CliRunner().invoke(main, ["serve", "--help-all"]).output
    assert re.findall(r"^(\S.*):$", text, re.MULTILINE) == [*Section, "Help"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "expected at least one PATH: a model repository, a model's folder or a .onnx file"),
        (("m", ""), "Invalid value for '[PATHS]...': expected a path, got ''"),
        (("m", "--model-repository", ""), "Invalid value for '--model-repository' / '--model-store': expected a path"),
        (("hf://org/bert",), "Invalid value for '[PATHS]...': expected a path on this machine, as URLs aren't supp"),
        (("m", "pvc://claim/m"), "Invalid value for '[PATHS]...': expected a path on this machine, as URLs aren't su"),
        (
            ("--model-store", "S3://bucket/m"),
            "Invalid value for '--model-repository' / '--model-store': expected a path on this machine, as URLs aren't",
        ),
        (("m", "--grpc-address", "dns:///a"), "Invalid value for '--grpc-address': expected a host name or an"),
        (("m", "--grpc-address", "unix:"), "Invalid value for '--grpc-address': expected unix:PATH"),
        (("m", "--grpc-address", "unix:/run/"), "Invalid value for '--grpc-address': expected unix:PATH"),
        (("m", "--grpc-address", "unix://host/a"), "Invalid value for '--grpc-address': expected unix:PATH"),
        (("m", "--grpc-address", "unix:a%00"), "Invalid value for '--grpc-address': expected unix:PATH"),
        (("m", "--grpc-address", "unix:p", "--grpc-port", "1"), "--grpc-port can't be combined with --grpc-address"),
        (("m", "--grpc-address", "unix:p", "--frontends", "2"), "--frontends 2 needs a TCP port"),
        (("m", "--grpc-socket-mode", "600"), "--grpc-socket-mode needs --grpc-address unix:PATH"),
        (("m", "--metrics-address", "unix:/run/p.sock"), "Invalid value for '--metrics-address': expected a host"),
        (
            ("m", "--metrics-address", ""),
            "Invalid value for '--metrics-address': expected a host name or",
        ),
        (("m", "--grpc-port", "65536"), "Invalid value for '--grpc-port'"),
        (("m", "--grpc-port", "-1"), "Invalid value for '--grpc-port'"),
        (("m", "--metrics-port", "http"), "Invalid value for '--metrics-port'"),
        (("m", "--allow-metrics", "perhaps"), "Invalid value for '--allow-metrics'"),
        (("m", "--exit-on-error"), "Option '--exit-on-error' requires an argument"),
        (("m", "--exit-timeout-secs", "-1"), "Invalid value for '--exit-timeout-secs'"),
        (("m", "--exit-timeout-secs", "nan"), "Invalid value for '--exit-timeout-secs'"),
        (("m", "--exit-timeout-secs", "inf"), "Invalid value for '--exit-timeout-secs'"),
        (("m", "--model-load-thread-count", "0"), "Invalid value for '--model-load-thread-count'"),
        (("m", "--model-load-retry-count", "-1"), "Invalid value for '--model-load-retry-count'"),
        (("m", "--model-control-mode", "manual"), "Invalid value for '--model-control-mode'"),
        (("m", "--repository-poll-secs", "0"), "Invalid value for '--repository-poll-secs'"),
        (("m", "--load-model", "a"), "--load-model needs --model-control-mode explicit"),
        (
            ("m", "--model-control-mode", "explicit", "--load-model", "*", "--load-model", "a"),
            "--load-model: expected '*' alone, or names, got both",
        ),
        (("m", "--grpc-server-cert", "a"), "certificates need --grpc-use-ssl true"),
        (("m", "--grpc-use-ssl", "true"), "TLS needs --grpc-server-cert and --grpc-server-key"),
        (("m", "--grpc-use-ssl", "true", "--grpc-server-cert", "a"), "TLS needs --grpc-server-cert and"),
        (
            ("m", "--grpc-use-ssl-mutual", "true", "--grpc-server-cert", "a", "--grpc-server-key", "b"),
            "--grpc-use-ssl-mutual needs --grpc-root-cert",
        ),
        (("m", "--grpc-restricted-protocol", "all:k=v"), "--grpc-restricted-protocol: expected groups among health"),
        (("m", "--grpc-max-message-bytes", "2147483648"), "Invalid value for '--grpc-max-message-bytes'"),
        (("m", "--grpc-max-concurrent-rpcs", "0"), "Invalid value for '--grpc-max-concurrent-rpcs'"),
        (("m", "--log-level", "chatty"), "Invalid value for '--log-level'"),
        (("m", "--log-format", "xml"), "Invalid value for '--log-format'"),
        (("m", "--http-port", "8000"), "No such option"),
        (("m", "--backend-config", "onnxruntime"), "--backend-config: expected BACKEND,KEY=VALUE, got 'onnxruntime'"),
        (("m", "--trace-config", "level=TIMESTAMPS"), "--trace-config: trace setting 'trace_level': TIMESTAMPS need"),
        (("--upstream", "9000"), "--upstream: expected HOST:PORT, or unix:PATH, got '9000'"),
        (("--upstream", "localhost:grpc"), "--upstream: expected HOST:PORT, or unix:PATH, got 'localhost:grpc'"),
        (("--upstream", "localhost:80000"), "--upstream: expected HOST:PORT, or unix:PATH, got 'localhost:80000'"),
        (("--upstream", "localhost:0"), "--upstream: expected HOST:PORT, or unix:PATH, got 'localhost:0'"),
        (
            ("--upstream", "http://localhost:1"),
            "--upstream: expected HOST:PORT, or unix:PATH, got 'http://localhost:1'",
        ),
        (("--upstream", "::1:80"), "--upstream: expected HOST:PORT, an IPv6 address in brackets, or unix:PATH, got"),
        (("--upstream", "a\udcff:1"), "Invalid value for '--upstream': expected UTF-8, got 'a\\udcff:1'"),
        (("m", "--id", "\udcff"), "Invalid value for '--id': expected UTF-8, got '\\udcff'"),
        (("m", "--max-batch-size", "2147483648"), "Invalid value for '--max-batch-size'"),
        (("m", "--max-queue-delay-microseconds", "1000000000001"), "Invalid value for '--max-queue-delay-microsec"),
        (("m", "--upstream", "localhost:1"), "--upstream can't be combined with a PATH"),
        (("--upstream", "localhost:1", "--allow-client-shm", "true"), "--upstream can't be combined with a PATH"),
        (("--upstream", "localhost:1", "--model-control-mode", "poll"), "--upstream can't be combined with a PATH"),
        (("--upstream", "localhost:1", "--upstream-health-secs", "nan"), "Invalid value for '--upstream-health-secs'"),
        (
            ("--upstream", "localhost:1", "--upstream-root-cert", "f"),
            "the upstream's certificates need --upstream-use-ssl true",
        ),
        (
            ("--upstream", "localhost:1", "--upstream-use-ssl", "true", "--upstream-client-key", "f"),
            "--upstream-client-cert and --upstream-client-key: expected both",
        ),
        (
            ("--upstream", "localhost:1", "--upstream-token-file", "f", "--upstream-header", "Authorization"),
            "--upstream-header authorization and --upstream-token-file: expected one",
        ),
        (
            ("--upstream", "localhost:1", "--upstream-header", "x-a,x-b"),
            "--upstream-header: expected letters, digits, '_', '.' and '-', got 'x-a,x-b'",
        ),
        (
            ("--upstream", "localhost:1", "--upstream-trace-header", "spür"),
            "--upstream-trace-header: expected letters, digits, '_', '.' and '-', got 'spür'",
        ),
        (("m", "--grpc-restricted-protocol", "inference:a=é"), "--grpc-restricted-protocol: expected a value of print"),
        (("m", "--upstream-model", "a"), "--upstream-model needs --upstream"),
        (("m", "--upstream-use-ssl", "false"), "--upstream-use-ssl needs --upstream"),
        (("--upstream-batches", "2"), "--upstream-batches needs --upstream"),
        (("--upstream", "localhost:1", "--upstream-batches", "0"), "Invalid value for '--upstream-batches'"),
        (
            ("m", "--grpc-header-forward-pattern", "x-("),
            "--grpc-header-forward-pattern: expected a regular expression, got 'x-('",
        ),
        (("m", "--model-config-name", "../x"), "--model-config-name: expected the name of a file, got '../x'"),
    ],
)
def test_usage_error_is_reported_with_status_2(arguments: tuple[str, ...], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"Error: {text}" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--grpc-address", "unix-abstract:a", "expected unix:PATH, as abstract sockets have no permissions, got"),
        ("--grpc-address", "unix:/" + "s" * 107, "expected a socket's path of at most 107 bytes, in a folder of"),
        ("--grpc-address", f"unix:/{'f' * 96}/s", "in a folder of at most 95, got '/fff"),
        ("--grpc-socket-mode", "rw", "expected permissions in octal, from 000 to 777, got 'rw'"),
        ("--grpc-socket-mode", "4755", "expected permissions in octal, from 000 to 777, got '4755'"),
    ],
)
def test_unusable_socket_is_refused_with_the_reason(flag: str, value: str, text: str) -> None:
    result = run("m", "--grpc-address", "unix:p", flag, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}'" in result.stderr
    assert text in result.stderr


def test_usage_error_in_the_environment_names_the_flag() -> None:
    result = run("m", GRPC_PORT="many")
    assert result.exit_code == 2
    assert "Invalid value for '--grpc-port'" in result.stderr


@pytest.mark.parametrize("given", ["/a:", ":", "/a::/b"])
def test_empty_path_in_the_environment_is_refused_and_not_the_current_folder(given: str) -> None:
    result = run(MODEL_REPOSITORY=given)
    assert result.exit_code == 2
    assert "'--model-repository' / '--model-store': expected a path, got ''" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("url", "what_to_do"),
    [
        ("hf://org/bert", "`hf download org/bert --local-dir bert`"),
        ("s3://bucket/models/m/", "`aws s3 cp --recursive s3://bucket/models/m m`"),
        ("gs://bucket/m", "`gcloud storage cp --recursive gs://bucket/m m`"),
        ("https://h/m.onnx?v=2", "`curl -fLO 'https://h/m.onnx?v=2'`"),
        ("file:///srv/m", "give the path alone: /srv/m"),
        ("oci://registry/m:1", "copy the files here"),
        ("pvc://claim/m", "mount the volume"),
        ("az://container/m", "copy the files here"),
    ],
)
def test_url_as_path_is_refused_with_what_to_do(url: str, what_to_do: str) -> None:
    result = run(url)
    assert result.exit_code == 2
    assert f"URLs aren't supported, got '{url}'; " in result.stderr
    assert what_to_do in result.stderr


def test_url_among_paths_in_the_environment_is_refused_whole() -> None:
    assert "got 's3://bucket/m'" in run(MODEL_REPOSITORY="/models:s3://bucket/m:/more").stderr


def test_upstream_variable_without_an_upstream_is_a_usage_error() -> None:
    result = run("m", UPSTREAM_TIMEOUT_SECS="3")
    assert result.exit_code == 2
    assert "Error: --upstream-timeout-secs needs --upstream" in result.stderr


def test_start_error_is_one_line_with_status_1(tmp_path: Path) -> None:
    result = run(str(tmp_path / "gone"), "--grpc-port", "0", "--metrics-port", "0", "--log-level", "error")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {tmp_path}/gone: No such file or directory\n"


def test_token_is_printed_with_its_line_for_the_token_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["token", "edge"])
    token, line = (text.partition(": ")[2] for text in result.stdout.splitlines())
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens(tmp_path / "tokens")
    tokens.open()
    assert tokens.name_of(f"Bearer {token}") == "edge"
    assert CliRunner().invoke(main, ["token", "a b"]).exit_code == 2


def test_help_names_both_modes_of_traces() -> None:
    text = " ".join(CliRunner().invoke(main, ["serve", "--help-all"]).output.split())
    assert "--trace-config [MODE,]KEY=VALUE" in text
    assert "into which file (mode triton) or to which collector (opentelemetry)" in text


def test_version_and_help_are_printed() -> None:
    assert CliRunner().invoke(main, ["--version"]).output.startswith("paceline, version ")
    for flag in ("-h", "--help"):
        result = CliRunner().invoke(main, [flag])
        assert result.exit_code == 0
        assert {"serve", "infer"} <= set(result.output.split())


def test_command_line_loads_no_runtime_before_it_serves() -> None:
    code = "import sys, server.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert not {"onnxruntime", "prometheus_client", "paceline.server.app"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("shell", "at"), [("bash", "2"), ("zsh", "2"), ("fish", "--grpc-p")], ids=lambda value: str(value)[:4]
)
def test_shells_complete_the_flags_of_commands(shell: str, at: str) -> None:
    asked = {"_PACELINE_COMPLETE": f"{shell}_complete", "COMP_WORDS": "paceline serve --grpc-p", "COMP_CWORD": at}
    program = [Path(sys.executable).with_name("paceline")]
    done = subprocess.run(program, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert "--grpc-port" in done.stdout


def test_python_m_server_is_the_command_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--help"], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: paceline ")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("infr", "did you mean 'infer'?"),
        ("Health", "did you mean 'health'?"),
        ("server", "did you mean 'serve'?"),
        ("tops", "did you mean 'top'?"),
        ("xyzzy", "see paceline --help"),
    ],
)
def test_unknown_command_gets_a_suggestion(typed: str, hint: str) -> None:
    result = CliRunner().invoke(main, [typed, "--rows", "1"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: no such command '{typed}': {hint}"


@pytest.mark.parametrize("command", ["serve", "infer", "health", "top"])
def test_unknown_flag_gets_a_suggestion(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--hepl"])
    assert result.exit_code == 2
    assert "--help" in result.stderr.splitlines()[-1]
