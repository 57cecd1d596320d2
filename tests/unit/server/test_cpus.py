"""Limits of cgroups, as files of both versions say them, and as a kernel does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.server.cpus import cgroup_limit
from tests.harness import REPO

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A `/` with what /proc says, and files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(f"23 1 0:1 / / rw - ext4 /dev/sda rw\n{mounts}\n")
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit", "by"),
    [
        ({"a/b/cpu.max": "150000 100000\n"}, 1.5, "a/b/cpu.max"),
        ({"a/b/cpu.max": "max 100000\n"}, math.inf, ""),
        ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5, "a/cpu.max"),
        ({"a/b/cpu.max": "max 100000\n", "cpu.max": "200000 100000\n"}, 2, "cpu.max"),
        ({"c/cpu.max": "10000 100000\n"}, math.inf, ""),
    ],
)
def test_smallest_limit_on_the_way_up_counts(tmp_path: Path, files: dict[str, str], limit: float, by: str) -> None:
    found, file = cgroup_limit(machine(tmp_path, "0::/a/b\n", V2, files))
    assert (found, file) == (limit, by and str(tmp_path / "sys/fs/cgroup" / by))


@pytest.mark.parametrize(("quota", "limit"), [("150000", 1.5), ("-1", math.inf), ("0", math.inf)])
def test_version_1_has_quota_and_period(tmp_path: Path, quota: str, limit: float) -> None:
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": quota, "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}
    groups = "4:memory:/b\n3:cpu,cpuacct:/a\n0::/\n"
    assert cgroup_limit(machine(tmp_path, groups, V1, files))[0] == limit


@pytest.mark.parametrize("group", ["/docker/1", "/", "/../../docker/1", "/docker/12"])
def test_container_sees_its_own_group_where_it_is_mounted(tmp_path: Path, group: str) -> None:
    mount = V2.replace(" / /sys/fs/cgroup ", " /docker/1 /sys/fs/cgroup ")
    root = machine(tmp_path, f"0::{group}\n", mount, {"cpu.max": "200000 100000"})
    assert cgroup_limit(root)[0] == 2


def test_escaped_mount_points_are_read(tmp_path: Path) -> None:
    mount = V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040groups")
    assert cgroup_limit(machine(tmp_path, "0::/\n", mount, {"my groups/cpu.max": "200000 100000"}))[0] == 2


def test_system_without_cgroups_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path) == (math.inf, "")


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """The file `cgroup.procs` of a new group with a limit of half a CPU."""
    for top, limits in (
        ("/sys/fs/cgroup", {"cpu.max": "50000 100000"}),
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
    ):
        folder = Path(top, f"paceline-test-{os.getpid()}")
        try:
            if not Path(top, "cgroup.procs").exists():
                continue
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, text in limits.items():
                (folder / name).write_text(text)
        except OSError:
            folder.rmdir()
            continue
        yield folder / "cgroup.procs"
        folder.rmdir()
        return
    pytest.skip("needs root, and a cgroup hierarchy that it can write to")


def test_process_in_a_limited_group_uses_one_cpu(limited_group: Path) -> None:
    code = "from paceline.server.cpus import usable_cpus; print(usable_cpus())"
    command = f'echo $$ >"{limited_group}" && exec "{sys.executable}" -c "{code}"'
    done = subprocess.run(["sh", "-c", command], cwd=REPO, capture_output=True, text=True, timeout=100)
    if done.returncode and "cannot create" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.startswith("Cpus(count=1, limited_by='limit of 0.5 in ")
