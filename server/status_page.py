"""The page at `/` of the metrics port, for people who open it: what else is there, and which models.

Lives here: its HTML. Must not: scripts or styles from elsewhere, or anything that `/metrics` and RepositoryIndex don't
tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from paceline.server.models.model_record import IndexLine

__all__ = ["status_page"]

_LINKS = {
    "/metrics": "metrics, for Prometheus",
    "/livez": "whether the process should be restarted",
    "/readyz": "whether requests may be sent, or why not",
}


def status_page(server_id: str, version: str, models: Iterable[IndexLine]) -> str:
    """HTML with links, and a row for each line of the repository's index."""
    links = "".join(f'<li><a href="{path}">{path}</a>: {what}</li>\n' for path, what in _LINKS.items())
    rows = "".join(
        f"<tr><td>{escape(line.name)}</td><td>{escape(line.version)}</td>"
        f"<td>{line.state.name if line.state else 'not loaded'}</td></tr>\n"
        for line in models
    )
    title = escape(f"{server_id} {version}")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>
<h1>{title}</h1>
<ul>
{links}</ul>
<table>
<tr><th>model</th><th>version</th><th>state</th></tr>
{rows}</table>
<p>Requests go to the gRPC port, not to this one.</p>
</body></html>
"""
