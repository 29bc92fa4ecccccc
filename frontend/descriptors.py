"""Descriptions of protobuf files from compact text, so that no generated module registers itself anywhere.

A line ``message Name`` opens a message (nested ones are written ``Outer.Name``); the lines under it are its fields:
name, number, type. ``*`` after a type means repeated, ``map<key,value>`` is a map, ``name?choice`` puts the field into
the oneof ``choice``. ``enum Name`` lists values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

_SCALARS: Final[dict[str, FieldDescriptorProto.Type.ValueType]] = {
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}


def build_file(
    name: str, package: str, schema: str, dependencies: Sequence[str] = (), dependency_schemas: Sequence[str] = ()
) -> FileDescriptorProto:
    """Return the description of one file of messages.

    Args:
        dependency_schemas: texts of files of the same package, whose enums may be named here.
    """
    file = FileDescriptorProto(name=name, package=package, syntax="proto3", dependency=dependencies)
    messages: dict[str, DescriptorProto] = {}
    enums = _enum_names(schema).union(*map(_enum_names, dependency_schemas))
    add_line = None
    for line in filter(None, map(str.strip, schema.splitlines())):
        keyword, _, rest = line.partition(" ")
        if keyword in ("message", "enum"):
            outer, _, own = rest.rpartition(".")
            if keyword == "message":
                siblings = messages[outer].nested_type if outer else file.message_type
                message = messages[rest] = siblings.add(name=own)
                add_line = _FieldAdder(message, package, rest, enums).add
            else:
                enum_siblings = messages[outer].enum_type if outer else file.enum_type
                add_line = _ValueAdder(enum_siblings.add(name=own)).add
        else:
            assert add_line is not None, f"field outside of a message: {line}"
            add_line(line)
    return file


def _enum_names(schema: str) -> set[str]:
    return {line[5:].strip() for line in schema.splitlines() if line.startswith("enum ")}


class _ValueAdder:
    """Adds the value lines of one enum."""

    def __init__(self, enum: descriptor_pb2.EnumDescriptorProto) -> None:
        self._enum = enum

    def add(self, line: str) -> None:
        name, number = line.split()
        self._enum.value.add(name=name, number=int(number))


class _FieldAdder:
    """Adds the field lines of one message, with the oneofs and map entries they imply."""

    def __init__(self, message: DescriptorProto, package: str, path: str, enums: set[str]) -> None:
        self._message = message
        self._package = package
        self._path = path
        self._enums = enums

    def add(self, line: str) -> None:
        label, number, type_text = line.split()
        name, _, choice = label.partition("?")
        field = self._message.field.add(name=name, number=int(number))
        field.label = FieldDescriptorProto.LABEL_OPTIONAL
        if type_text.endswith("*"):
            field.label = FieldDescriptorProto.LABEL_REPEATED
            type_text = type_text[:-1]
        if type_text.startswith("map<"):
            field.label = FieldDescriptorProto.LABEL_REPEATED
            type_text = self._add_entry(name, *type_text[4:-1].split(","))
        if choice:
            field.oneof_index = self._oneof(choice)
        self._set_type(field, type_text)

    def _add_entry(self, field_name: str, key: str, value: str) -> str:
        entry_name = "".join(word.capitalize() for word in field_name.split("_")) + "Entry"
        entry = self._message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        for name, number, type_text in (("key", 1, key), ("value", 2, value)):
            field = entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            self._set_type(field, type_text)
        return f"{self._path}.{entry_name}"

    def _oneof(self, choice: str) -> int:
        names = [oneof.name for oneof in self._message.oneof_decl]
        if choice not in names:
            self._message.oneof_decl.add(name=choice)
            return len(names)
        return names.index(choice)

    def _set_type(self, field: FieldDescriptorProto, type_text: str) -> None:
        scalar = _SCALARS.get(type_text)
        if scalar is not None:
            field.type = scalar
            return
        field.type = FieldDescriptorProto.TYPE_ENUM if type_text in self._enums else FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{self._package}.{type_text}"
