"""docs/protocol.md lists exactly the flags of Triton."""

from __future__ import annotations

import re
import subprocess

from tests.differential.triton_process import command
from tests.harness import REPO

LATER = {"--allow-client-shm", "--grpc-infer-thread-count", "--grpc-max-response-pool-size", "--http-max-input-size"}
"""Flags newer than the version that is tested here."""


def test_every_flag_of_triton_is_documented(installed: None) -> None:
    arguments, environment = command()
    # It prints its flags, and its exit status says that it won't start.
    shown = subprocess.run([*arguments, "--help"], env=environment, capture_output=True, text=True, timeout=60)
    theirs = set(re.findall(r"^\s+(--[a-z0-9-]+)", shown.stdout + shown.stderr, re.MULTILINE)) - {"--help"}
    told = (REPO / "docs" / "protocol.md").read_text(encoding="utf-8").partition("### Flags")[2]
    assert set(re.findall(r"`(--[a-z0-9-]+)`", told)) - LATER == theirs
