"""Server reflection: tools such as grpcurl learn the services without a .proto file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from frontend.kserve.proto import config_file, service_file


def enable_reflection(server: Any, services: Sequence[str]) -> None:
    """Add the reflection service (v1alpha, the one its library has; tools fall back to it) to a grpcio server.

    It reads a pool made for it: the default one may hold a client's files of the same names.
    """
    pool = descriptor_pool.DescriptorPool()
    for file in (config_file(), service_file()):
        pool.AddSerializedFile(file.SerializeToString())
    for module in (health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server, pool=pool)
