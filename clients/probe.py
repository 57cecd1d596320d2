"""The command `health`: whether a server takes requests, as an exit code. `paceline` mounts it.

For where nothing but a command can ask, such as a container's HEALTHCHECK, and for Kubernetes where the server speaks
TLS: its own gRPC probes don't. Every option is an environment variable too, as a HEALTHCHECK's command is fixed.
"""

from __future__ import annotations

import click

from clients.access import Access, Seconds, access_options, one_line_errors
from clients.sync import InferenceClient

__all__ = ["health"]

_SERVING = "SERVING"


@click.command()
@click.option(
    "--server",
    default="127.0.0.1:8001",
    show_default=True,
    show_envvar=True,
    envvar="PACELINE_HEALTH_SERVER",
    metavar="HOST:PORT",
    help="Where the server is.",
)
@click.option("--service", default="", help="Whose status: 'liveness', or by default whether it takes requests.")
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
def health(server: str, service: str, timeout_s: float, access: Access) -> None:
    """Ask a server's health service; exit code 0 if it says SERVING, 2 if an option can't be used, else 1.

    Health needs no token.
    """
    tls = access.tls or False
    with (
        one_line_errors(access),
        InferenceClient(server, timeout_s=timeout_s, tls=tls, token=access.token) as client,
    ):
        status = client.health(service)
        click.echo(status)
    if status != _SERVING:
        raise click.exceptions.Exit(click.ClickException.exit_code)
