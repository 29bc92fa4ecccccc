"""The control service's messages on a descriptor pool of their own, as KServe's are."""

from __future__ import annotations

from typing import Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message

from frontend.control.schema import FILE, PACKAGE, RPCS, SCHEMA, SERVICE
from frontend.descriptors import build_file


def control_file() -> FileDescriptorProto:
    """Return the description of the service and its messages."""
    file = build_file(FILE, PACKAGE, SCHEMA)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for rpc in RPCS:
        service.method.add(name=rpc, input_type=f".{PACKAGE}.{rpc}Request", output_type=f".{PACKAGE}.{rpc}Response")
    return file


def message_class(name: str) -> type[Message]:
    """Return the class of a message, such as ``SetModelPolicyRequest``."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


POOL: Final = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(control_file().SerializeToString())
