"""What the commands print, and how they end: usage errors, errors of the start, help, suggestions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from paceline.server.cli import main, serve
from paceline.server.flags import Flag, Section
from paceline.server.rpc.credentials import Tokens
from tests.harness import REPO


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments], env={f"PACELINE_{k}": v for k, v in environment.items()})


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
        (("m", "--allow-metrics=0", "--status-page=1"), "--status-page true needs the metrics port, which --allow-met"),
        (("m", "--allow-metrics=perhaps"), "Invalid value for '--allow-metrics'"),
        (("m", "--allow-metrics", "flase"), "Invalid value for '--allow-metrics'"),
        (("m", "--grpc-port"), "Option '--grpc-port' requires an argument"),
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
        (("m", "--cache-config", "redis,host=a"), "--cache-config: expected cache 'local', the only one in this build"),
        (("--upstream", "localhost:1", "--cache-config=local,size=1"), "--cache-config can't be combined with --upstr"),
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
def test_empty_path_in_environment_is_refused(given: str) -> None:
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


@pytest.mark.parametrize("command", ["serve", "check", "bulk", "tune"])
@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (".", False),
        (". --allow-python-models", True),
        ("--allow-python-models .", True),
        ("--allow-python-models -- .", True),
        ("--allow-python-models true .", True),
        ("--allow-python-models=false .", False),
        ("--allow-python-models False .", False),
    ],
)
def test_python_models_are_allowed_alike_everywhere(command: str, given: str, allowed: bool) -> None:
    _, found, words = main.resolve_command(click.Context(main), [command, *given.split()])
    assert found is not None
    with found.make_context(command, words, resilient_parsing=True) as context:
        paths = context.params["paths"] if "paths" in context.params else [context.params["model"]]
        assert ([str(path) for path in paths], context.params["allow_python_models"]) == (["."], allowed)


def test_upstream_variable_without_an_upstream_is_a_usage_error() -> None:
    result = run("m", UPSTREAM_TIMEOUT_SECS="3")
    assert result.exit_code == 2
    assert "Error: --upstream-timeout-secs needs --upstream" in result.stderr


def test_start_error_is_one_line_with_status_1(tmp_path: Path) -> None:
    result = run(str(tmp_path / "gone"), "--grpc-port", "0", "--metrics-port", "0", "--log-level", "error")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {tmp_path}/gone: No such file or directory\n"


def test_token_is_printed_with_its_file_line(tmp_path: Path) -> None:
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
