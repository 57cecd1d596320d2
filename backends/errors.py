"""What can go wrong in a backend.

BackendError
├── DeviceError        a device's driver refused or failed, whatever the model
├── LoadError          the model can't be opened as asked: bad file, missing device, unsupported option
└── ExecutionError     one execution failed: the runtime raised, or the model's outputs don't fit its spec
    ├── UpstreamRefused     another server, which executes, has something against this batch
    └── SessionError   it failed whatever the requests
        ├── OutOfMemory     there wasn't memory enough, on the device or beside it, for so large a batch
        ├── Unequipped      the runtime lacks a library, or kernels for the device: no execution will do better
        ├── InstanceLost    it won't execute anything any more; another instance may
        │   ├── DeviceLost      the device is gone, or refuses everything from now on
        │   ├── StalePlan       its session has plans for another execution; nothing of this batch was computed
        │   └── ProcessError    the process that runs the model ended
        │       └── ProcessGone     and that before it had begun on this batch
        └── UpstreamFailed  another server, which executes, isn't there or takes nothing
"""

__all__ = [
    "BackendError",
    "DeviceError",
    "DeviceLost",
    "ExecutionError",
    "InstanceLost",
    "LoadError",
    "OutOfMemory",
    "ProcessError",
    "ProcessGone",
    "SessionError",
    "StalePlan",
    "Unequipped",
    "UpstreamFailed",
    "UpstreamRefused",
]


class BackendError(Exception):
    """Base of everything that a backend raises on purpose; the message is for the user."""


class DeviceError(BackendError):
    """A device's driver isn't there, refused or failed."""


class LoadError(BackendError):
    """The model can't be opened as asked. Raised before the model serves anything."""


class ExecutionError(BackendError):
    """One execution failed; the instance is still usable."""


class SessionError(ExecutionError):
    """The instance failed as a whole; running the requests apart from each other won't help."""


class OutOfMemory(SessionError):
    """There wasn't memory enough. A smaller batch may succeed, at once."""


class Unequipped(SessionError):
    """The runtime lacks a library that the model needs, or kernels for the device: no execution here can succeed."""


class InstanceLost(SessionError):
    """The instance won't execute anything any more; another may, on the same device or not."""


class DeviceLost(InstanceLost):
    """The device is gone, or refuses everything from now on."""


class StalePlan(InstanceLost):
    """An execution that would go by what its session planned for another one; nothing was computed."""


class UpstreamRefused(ExecutionError):
    """The upstream answered a batch with an error that some of its requests may be to blame for. `status` is the name
    of gRPC's status."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class UpstreamFailed(SessionError):
    """The upstream answers nothing, or refuses whatever it is sent now. `status` is the name of gRPC's status."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class ProcessError(InstanceLost):
    """The process that runs the model ended."""


class ProcessGone(ProcessError):
    """It had ended before it began on this batch, which may execute elsewhere."""
