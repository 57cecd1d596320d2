"""What can go wrong in a backend.

BackendError
├── DeviceError        a device's driver refused or failed, whatever the model
├── LoadError          the model can't be opened as asked: bad file, missing device, unsupported option
│   ├── NoDriver            nothing of a device's driver is installed, as on machines without the device
│   └── DriverFailed        a device's driver is there, and fails; there may well be a device
└── ExecutionError     one execution failed: the runtime raised, or the model's outputs don't fit its spec
    ├── UnfitOutputs        they aren't those of the spec: there are others, or their datatypes or shapes are others
    ├── ModelRefused        the model answered a request with an error of its own
    ├── UpstreamRefused     another server, which executes, or a model that was called answered this batch with an error
    └── InstanceError   it failed whatever the requests
        ├── OutOfMemory     too little memory, on the device or the host, for a batch this large
        ├── Unequipped      the runtime lacks a library, or kernels for the device: no execution will succeed
        ├── InstanceLost    the instance won't execute anything any more; another one may
        │   ├── DeviceLost      the device is gone, or refuses everything from now on
        │   ├── StalePlan       its session has plans for another execution; nothing of this batch was computed
        │   ├── StepHangs       a step of a model that generates takes longer than executions may
        │   └── ProcessError    the process that runs the model ended
        │       └── ProcessEndedBeforeBatch     and did so before it began this batch
        └── UpstreamFailed  another server, which executes, or a model that was called can't be had, or not in time
"""

from __future__ import annotations

from concurrent.futures import Future


class BackendError(Exception):
    """Base of everything that a backend raises on purpose; the message is for the user."""


class DeviceError(BackendError):
    """A device's driver is missing, refused or failed."""


class LoadError(BackendError):
    """The model can't be opened as asked. Raised before the model serves anything."""


class NoDriver(LoadError):
    """A device's driver isn't installed: most likely, there is no such device."""


class DriverFailed(LoadError):
    """A device's driver is installed, and fails: what is missing isn't a device."""


class ExecutionError(BackendError):
    """One execution failed; the instance is still usable."""


class UnfitOutputs(ExecutionError):
    """The outputs aren't those of the spec: others, or other datatypes or shapes, though not for lack of elements."""


class InstanceError(ExecutionError):
    """The instance failed as a whole; running the requests separately won't help."""


class OutOfMemory(InstanceError):
    """There was too little memory. A smaller batch may succeed at once."""


class Unequipped(InstanceError):
    """The runtime lacks a library that the model needs, or kernels for the device: no execution here can succeed."""


class InstanceLost(InstanceError):
    """The instance won't execute anything any more; another one may, on the same device or not."""


class DeviceLost(InstanceLost):
    """The device is gone, or refuses everything from now on."""


class StepHangs(InstanceLost):
    """A step takes longer than executions may. Until it has `ended` after all, what it uses must not be closed."""

    def __init__(self, limit_ns: int, ended: Future[None]) -> None:
        super().__init__(f"a step took longer than the limit of executions, {limit_ns / 1e9:g} s")
        self.ended = ended


class StalePlan(InstanceLost):
    """The execution would have used what its session planned for another one; nothing was computed."""


class ModelRefused(ExecutionError):
    """The model answered a request with an error of its own. `status` is the name of the gRPC status."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class UpstreamRefused(ExecutionError):
    """The upstream, or a model that was called, answered a batch with an error that some of its requests may have
    caused. `status` is the name of the gRPC status."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class UpstreamFailed(InstanceError):
    """The upstream, or a model that was called, doesn't answer, or refuses whatever it is sent now. `status` is the
    name of the gRPC status."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class ProcessError(InstanceLost):
    """The process that runs the model ended."""


class ProcessEndedBeforeBatch(ProcessError):
    """The process ended before it began this batch, which may execute elsewhere."""


WITH_STATUS = (ModelRefused, UpstreamRefused, UpstreamFailed)
"""Those that keep the status that somebody else has given them."""
