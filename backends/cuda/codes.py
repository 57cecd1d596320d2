"""What the result codes of CUDA's driver mean; its runtime's are the same numbers.

Lives here: the codes after which a device is lost, and finding a code in an error. Must not: calls.
"""

from __future__ import annotations

import re

from paceline.backends.errors import DeviceError

__all__ = ["BROKEN", "GONE", "code_of"]

# Those after which, says NVIDIA, the process must be terminated and relaunched to use CUDA again: every further call
# fails with the same. ECC and NVLink errors, what kernels did wrong (addresses, instructions, asserts, time), a process
# of the same MPS server that was ended, and another device's error.
BROKEN = frozenset((214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))
# The device is gone, or gone for this process: the driver was shut down, the device is unavailable, there is none, its
# context is gone, or CUDA has no name for the error, as after a reset.
GONE = frozenset((3, 4, 46, 100, 101, 201, 709, 999))

_CODE = re.compile(r"returned (\d+) \(")


def code_of(error: DeviceError) -> int | None:
    """The driver's code in `error`; None if it is none of its calls that failed."""
    found = _CODE.search(str(error))
    return int(found[1]) if found else None
