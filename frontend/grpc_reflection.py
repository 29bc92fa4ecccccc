"""Server reflection: tools such as grpcurl learn the services without a .proto file.

The v1 protocol is v1alpha under another package name, message for message, so one class answers both. It stands on the
message types only: the reflection library's servicer needs grpcio, which not every server of ours loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from engines.errors import InvalidInput
from frontend.kserve.proto import config_file, service_file

ALPHA_PACKAGE: Final = "grpc.reflection.v1alpha"
PACKAGE: Final = "grpc.reflection.v1"
SERVICES: Final = (f"{ALPHA_PACKAGE}.ServerReflection", f"{PACKAGE}.ServerReflection")
PATHS: Final = tuple(f"/{service}/ServerReflectionInfo" for service in SERVICES)
_INVALID_ARGUMENT: Final = 3
_NOT_FOUND: Final = 5


class Reflection:
    """Answers ServerReflectionRequest messages about ``services``.

    It reads a pool made for it: the default one may hold a client's files of the same names.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = sorted((*services, *SERVICES))
        self._pool = pool = descriptor_pool.DescriptorPool()
        for file in (config_file(), service_file()):
            pool.AddSerializedFile(file.SerializeToString())
        for module in (health_pb2, reflection_pb2):
            pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        pool.AddSerializedFile(_v1_file().SerializeToString())

    def answer(self, data: bytes) -> bytes:
        """Return the ServerReflectionResponse to one request; what is not found is told inside of it.

        Raises:
            InvalidInput: not a ServerReflectionRequest.
        """
        try:
            request: Any = reflection_pb2.ServerReflectionRequest.FromString(data)
        except DecodeError as error:
            raise InvalidInput(f"failed to parse the ServerReflectionRequest message: {error}") from error
        response: Any = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
        try:
            self._fill(request, response)
        except KeyError:
            response.error_response.error_code = _NOT_FOUND
            response.error_response.error_message = "not found"
        message: bytes = response.SerializeToString()
        return message

    def _fill(self, request: Any, response: Any) -> None:
        pool = self._pool
        match request.WhichOneof("message_request"):
            case "file_by_filename":
                _add_files(response, pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _add_files(response, pool.FindFileContainingSymbol(request.file_containing_symbol))
            case "file_containing_extension":
                wanted = request.file_containing_extension
                extended = pool.FindMessageTypeByName(wanted.containing_type)
                extension = pool.FindExtensionByNumber(extended, wanted.extension_number)
                _add_files(response, pool.FindFileContainingSymbol(extension.full_name))
            case "all_extension_numbers_of_type":
                extended = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                found = response.all_extension_numbers_response
                found.base_type_name = extended.full_name
                found.extension_number.extend(sorted(one.number for one in pool.FindAllExtensions(extended)))
            case "list_services":
                for service in self._services:
                    response.list_services_response.service.add(name=service)
            case _:
                response.error_response.error_code = _INVALID_ARGUMENT
                response.error_response.error_message = "the request asks for nothing"


def _add_files(response: Any, file: Any) -> None:
    """Add a file and all it depends on, each once."""
    add: Callable[[bytes], None] = response.file_descriptor_response.file_descriptor_proto.append
    seen: set[str] = set()
    waiting = [file]
    while waiting:
        one = waiting.pop()
        if one.name not in seen:
            seen.add(one.name)
            add(one.serialized_pb)
            waiting.extend(one.dependencies)


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = PACKAGE
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _renamed(field.type_name)
    for method in file.service[0].method:
        method.input_type = _renamed(method.input_type)
        method.output_type = _renamed(method.output_type)
    return file


def _renamed(type_name: str) -> str:
    return type_name.replace(f".{ALPHA_PACKAGE}.", f".{PACKAGE}.")
