"""The command `health`: whether a server is ready, as an exit code. `paceline` mounts it.

For places where only a command can ask, such as a container's HEALTHCHECK, and for Kubernetes if the server speaks TLS,
which its own gRPC probes don't. The server's address, TLS and the token can also come from the environment, because a
HEALTHCHECK's command is fixed.

Lives here: the command and its exit codes. Must not: connecting to the server (connection_options.py, sync.py).
"""

from __future__ import annotations

import click

from paceline.clients.connection_options import ConnectionOptions, Seconds, Server, access_options, one_line_errors
from paceline.clients.errors import InferenceError
from paceline.clients.printable import printable
from paceline.clients.sync import InferenceClient

__all__ = ["health"]

_SERVING = "SERVING"
_MOST_REASONS = 20


@click.command()
@click.option(
    "--server",
    type=Server(),
    default="127.0.0.1:8001",
    show_default=True,
    show_envvar=True,
    envvar="PACELINE_HEALTH_SERVER",
    metavar="HOST[:PORT]",
    help="Server address, by default with port 8001; or unix:PATH.",
)
@click.option("--service", default="", help="'liveness'; by default the server: whether it is ready.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for the answer.",
)
@access_options
def health(server: str, service: str, timeout_s: float, access: ConnectionOptions) -> None:
    """Ask a server's health service; exit with 0 if it says SERVING, 2 if an option can't be used, else 1.

    No token is needed, except to learn why a server that requires tokens isn't ready: that is on stderr, a line for
    each model.
    """
    tls = access.tls or False
    with (
        one_line_errors(access),
        InferenceClient(server, timeout_s=timeout_s, tls=tls, token=access.token) as client,
    ):
        status = client.health(service)
        click.echo(status)
        if status != _SERVING:
            for reason in _reasons(client, service):
                click.echo(printable(" ".join(reason.split())), err=True)
    if status != _SERVING:
        raise click.exceptions.Exit(click.ClickException.exit_code)


def _reasons(client: InferenceClient, service: str) -> list[str]:
    """Why the server isn't ready, as its index of models tells it. `/readyz` alone has what isn't about one model."""
    if service == "liveness":
        return ["only a restart helps; /livez on the metrics port says why"]
    try:
        entries = client.repository_index()
    except InferenceError as error:
        return [f"the states of its models are unknown: {error}"]
    serving = {entry.name for entry in entries if entry.state == "READY"}
    reasons = [
        f"model '{entry.name}'{entry.version and f' version {entry.version}'} is {entry.state}"
        f"{entry.reason and f': {entry.reason}'}"
        for entry in entries
        if entry.name not in serving and entry.state and entry.reason != "unloaded"
    ]
    if not reasons:
        return ["no model is to blame: it may be starting or stopping; /readyz on the metrics port says why"]
    more = len(reasons) - _MOST_REASONS
    return reasons[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else [])
