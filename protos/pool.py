"""The private descriptor pool that our generated modules register in, and how their classes are built.

Lives here: the pool, and the builder that the generated modules call. Must not live here: anything about a particular
message.

Rule: nothing of ours enters protobuf's default pool. tritonclient, kserve and stubs that users generate describe other
files with the same package and message names; the default pool takes only one of each, and whoever comes second fails
at import. That is also why protobuf's own builder is not used: with the pure Python implementation it enters each
message class into the default pool, whichever pool the file is in.
"""

from __future__ import annotations

from typing import Any, Final, cast

from google.protobuf import message, reflection
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

POOL: Final = DescriptorPool()
"""Every file, message and service of this package; server reflection has to be given this pool."""


def build_module(file: FileDescriptor, module_name: str, module: dict[str, Any]) -> None:
    """Fills `module`, the globals of the generated module called `module_name`, with what `file` defines.

    For internal use of the generated modules: called once each, while they are imported.
    """
    if file.extensions_by_name:
        raise NotImplementedError(f"{file.name} defines extensions, which protos.pool does not build")
    for name, enum in file.enum_types_by_name.items():
        module[f"_{name.upper()}"] = enum
        module[name] = EnumTypeWrapper(enum)
        module.update((value.name, value.number) for value in enum.values)
    for name, service in file.services_by_name.items():
        module[f"_{name.upper()}"] = service
    for name, descriptor in file.message_types_by_name.items():
        module[name] = _message_class(descriptor, module_name, name)


def _message_class(descriptor: Descriptor, module_name: str, qualified_name: str) -> type[message.Message]:
    namespace: dict[str, Any] = {
        name: _message_class(nested, module_name, f"{qualified_name}.{name}")
        for name, nested in descriptor.nested_types_by_name.items()
    }
    namespace.update(DESCRIPTOR=descriptor, __module__=module_name, __qualname__=qualified_name)
    built = reflection.GeneratedProtocolMessageType(descriptor.name, (message.Message,), namespace)
    return cast("type[message.Message]", built)
