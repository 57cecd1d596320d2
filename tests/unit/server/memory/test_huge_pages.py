"""Whether the serving process has its C library ask for huge pages."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from paceline.server.memory.huge_pages import TUNABLES, wanted
from tests.harness import ServerProcess, write_identity

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ASKS = "always [madvise] never"
GLIBC = "glibc 2.36"

needs_huge_pages_on_request = pytest.mark.skipif(
    not (sys.platform == "linux" and MODE.exists() and wanted({}, MODE.read_text(), os.confstr("CS_GNU_LIBC_VERSION"))),
    reason="this system gives huge pages to everybody or nobody, or its C library can't ask",
)


@pytest.mark.parametrize(
    ("environment", "mode", "libc", "asks"),
    [
        ({}, ASKS, GLIBC, True),
        ({}, ASKS, "glibc 2.35", True),
        ({}, ASKS, "glibc 3.0", True),
        ({}, ASKS, "glibc 2.34", False),
        ({}, ASKS, "", False),
        ({}, "[always] madvise never", GLIBC, False),
        ({}, "always madvise [never]", GLIBC, False),
        ({}, "", GLIBC, False),
        ({TUNABLES: ""}, ASKS, GLIBC, False),
        ({TUNABLES: "glibc.malloc.check=3"}, ASKS, GLIBC, False),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, ASKS, GLIBC, False),
    ],
)
def test_huge_pages_are_requested_where_it_matters_unless_the_environment_decides(
    environment: dict[str, str], mode: str, libc: str, asks: bool
) -> None:
    assert wanted(environment, mode, libc) is asks


def malloc_tunables(server: ServerProcess) -> set[str]:
    """The settings given to the process's C library, which terminates each of them where the kernel shows them."""
    environment = Path(f"/proc/{server.pid}/environ").read_bytes().decode()
    return set(re.findall(r"glibc\.malloc\.\w+=\d+", environment))


@needs_huge_pages_on_request
def test_server_has_its_c_library_request_huge_pages_and_keep_freed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    write_identity(tmp_path)
    with ServerProcess(tmp_path, fresh=True) as server:
        assert malloc_tunables(server) == {
            "glibc.malloc.hugetlb=1",
            "glibc.malloc.mmap_threshold=268435456",
            "glibc.malloc.trim_threshold=268435456",
        }


@needs_huge_pages_on_request
def test_server_leaves_tunables_given_in_the_environment_unchanged(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, env={TUNABLES: "glibc.malloc.tcache_count=7"}) as server:
        assert malloc_tunables(server) == {"glibc.malloc.tcache_count=7"}
