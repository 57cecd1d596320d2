"""The command `health`: whether a server takes requests, as an exit code. `paceline` mounts it.

For where nothing but a command can ask, such as a container's HEALTHCHECK; Kubernetes asks grpc.health.v1 itself.
"""

from __future__ import annotations

import click

from clients.errors import ClientError
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
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for the answer.",
)
def health(server: str, service: str, timeout_s: float) -> None:
    """Ask a server's health service; exit code 0 if it says SERVING, else 1."""
    try:
        with InferenceClient(server, timeout_s=timeout_s) as client:
            status = client.health(service)
    except ClientError as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    click.echo(status)
    if status != _SERVING:
        raise click.exceptions.Exit(click.ClickException.exit_code)
