"""Settings of the C library and of Python that make the serving process faster."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other settings")

FAULTS_OF_SECOND_BLOCK = """
import ctypes, resource
from paceline.server.tuning import keep_freed_memory

keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    clean = {key: value for key, value in os.environ.items() if "MALLOC" not in key and key != "GLIBC_TUNABLES"}
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_SECOND_BLOCK],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(ran.stdout)


@on_glibc
def test_freed_memory_is_kept_for_reuse_unless_the_environment_says_otherwise() -> None:
    assert faults() < faults(MALLOC_MMAP_THRESHOLD_="131072") / 4


WHAT_THE_COLLECTOR_LOOKS_AT = """
import gc, sys
sys.argv = ["paceline", "--version"]
from paceline.server.__main__ import main
try:
    main()
finally:
    looked_at = len(gc.get_objects())
    sys.stderr.write(f"{gc.isenabled()} {gc.get_freeze_count() > 9 * looked_at}")
"""


def test_imported_objects_are_excluded_from_garbage_collection() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WHAT_THE_COLLECTOR_LOOKS_AT], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stderr == "True True"


def test_objects_made_later_are_still_garbage_collected() -> None:
    code = """
import gc, weakref
from paceline.server.tuning import excluded_from_gc
class Ring:
    pass
with excluded_from_gc():
    pass
ring = Ring()
ring.self, gone = ring, weakref.ref(ring)
del ring
gc.collect()
print(gone() is None)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "True\n"
