"""Our description of the gRPC service against the one that a real client ships: what we declare must be the same."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from tritonclient.grpc import model_config_pb2, service_pb2

from frontend.kserve import proto, proto_schema


def theirs(module: Any) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


PAIRS = [(proto.config_file(), theirs(model_config_pb2)), (proto.service_file(), theirs(service_pb2))]


def messages(file: FileDescriptorProto) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(message: Any, prefix: str) -> None:
        found[prefix + message.name] = message
        for nested in message.nested_type:
            walk(nested, f"{prefix}{message.name}.")

    for message in file.message_type:
        walk(message, "")
    return found


def fact(message: Any, field: FieldDescriptorProto) -> tuple[Any, ...]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.number, field.label, field.type, field.type_name, oneof


@pytest.mark.parametrize(("ours", "other"), PAIRS, ids=["config", "service"])
def test_every_declared_message_has_the_clients_names_numbers_labels_and_types(ours: Any, other: Any) -> None:
    known = messages(other)
    for name, message in messages(ours).items():
        fields = {field.name: fact(known[name], field) for field in known[name].field}
        for field in message.field:
            assert fields[field.name] == fact(message, field), f"{name}.{field.name}"
        assert message.options.map_entry == known[name].options.map_entry
    assert (ours.name, ours.package, ours.syntax) == (other.name, other.package, other.syntax)


@pytest.mark.parametrize(("ours", "other"), PAIRS, ids=["config", "service"])
def test_enums_have_the_clients_values(ours: Any, other: Any) -> None:
    def enums(file: Any) -> dict[str, list[tuple[str, int]]]:
        found = {enum.name: enum for enum in file.enum_type}
        for name, message in messages(file).items():
            found |= {f"{name}.{enum.name}": enum for enum in message.enum_type}
        return {name: [(value.name, value.number) for value in enum.value] for name, enum in found.items()}

    known = enums(other)
    for name, values in enums(ours).items():
        assert known[name] == values


def test_the_service_messages_are_complete() -> None:
    ours, other = messages(PAIRS[1][0]), messages(PAIRS[1][1])
    assert set(ours) == set(other)
    for name, message in other.items():
        assert {field.name for field in message.field} == {field.name for field in ours[name].field}, name


def test_all_rpcs_are_declared_alike() -> None:
    def rpcs(file: Any) -> dict[str, tuple[Any, ...]]:
        return {
            m.name: (m.input_type, m.output_type, m.client_streaming, m.server_streaming)
            for m in file.service[0].method
        }

    assert rpcs(PAIRS[1][0]) == rpcs(PAIRS[1][1])
    assert len(proto_schema.RPCS) == 20


def test_the_pool_is_private() -> None:
    mine = proto.message_class("ModelInferRequest")
    assert mine is not service_pb2.ModelInferRequest
    assert mine.FromString(service_pb2.ModelInferRequest(id="x").SerializeToString()).id == "x"  # type: ignore[attr-defined]
