"""KServe's gRPC messages on a descriptor pool of our own.

Two public clients register files of the same names and symbols in protobuf's default pool, and conflict with each
other there. A private pool lets either be imported beside this server.
"""

from __future__ import annotations

from typing import Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message

from frontend.descriptors import build_file
from frontend.kserve.proto_schema import (
    CONFIG_FILE,
    CONFIG_SCHEMA,
    PACKAGE,
    RPCS,
    SERVICE,
    SERVICE_FILE,
    SERVICE_SCHEMA,
    STREAM_RPC,
)


def config_file() -> FileDescriptorProto:
    """Return the description of the model configuration messages."""
    return build_file(CONFIG_FILE, PACKAGE, CONFIG_SCHEMA)


def service_file() -> FileDescriptorProto:
    """Return the description of the service and its messages."""
    file = build_file(SERVICE_FILE, PACKAGE, SERVICE_SCHEMA, (CONFIG_FILE,), (CONFIG_SCHEMA,))
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for rpc in RPCS:
        if rpc == STREAM_RPC:
            request, response = "ModelInferRequest", "ModelStreamInferResponse"
        else:
            request, response = f"{rpc}Request", f"{rpc}Response"
        service.method.add(
            name=rpc,
            input_type=f".{PACKAGE}.{request}",
            output_type=f".{PACKAGE}.{response}",
            client_streaming=rpc == STREAM_RPC,
            server_streaming=rpc == STREAM_RPC,
        )
    return file


def message_class(name: str) -> type[Message]:
    """Return the class of a message, such as ``ModelInferRequest`` or ``ModelInferRequest.InferInputTensor``."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


POOL: Final = descriptor_pool.DescriptorPool()
for _file in (config_file(), service_file()):
    POOL.AddSerializedFile(_file.SerializeToString())
