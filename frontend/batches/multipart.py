"""``multipart/form-data`` of a file upload, as it streams: small fields whole, the file piece by piece.

The parser is ``python-multipart``: it pushes, does no I/O, bounds headers, and most Python web servers stand on it, so
that its traps have been found by others. Not ``multipart``: its module has the name that old releases of the former
install, too. Not an own one: this format has been read in two ways too often.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from frontend.openai.errors import ApiError

# It warns of every malformed body by itself; refusals are told to whoever sent it, and a log is not theirs to fill.
logging.getLogger("python_multipart.multipart").setLevel(logging.ERROR)

MAX_PARTS: Final = 16
MAX_PART_HEADERS: Final = 8
MAX_PART_HEADER_BYTES: Final = 8 * 1024
MAX_FIELD_BYTES: Final = 1024
MAX_BOUNDARY_BYTES: Final = 70
"""RFC 2046, 5.1.1."""
OVERHEAD_BYTES: Final = MAX_PARTS * (MAX_PART_HEADERS * MAX_PART_HEADER_BYTES + MAX_FIELD_BYTES)
"""What a form may add to its file."""


@dataclass(frozen=True, slots=True)
class Field:
    """A small text field, complete."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileStart:
    """The file begins; its bytes follow, then ``FileEnd``."""

    filename: str


@dataclass(frozen=True, slots=True)
class FileEnd:
    """The file is complete."""


Event = Field | FileStart | bytes | FileEnd


class FormReader:
    """Turns the pieces of one body into events; fields come in any order."""

    def __init__(self, content_type: str) -> None:
        """Raises: ApiError: this is no form."""
        boundary = _boundary(content_type)
        self._opening: bytes | None = b""
        self._delimiter = b"--" + boundary
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_ends,
                "on_end": self._form_ends,
            },
            max_header_count=MAX_PART_HEADERS,
            max_header_size=MAX_PART_HEADER_BYTES,
        )
        self._events: list[Event] = []
        self._parts = 0
        self._names: set[str] = set()
        self._header = b""
        self._value = b""
        self._disposition: str | None = None
        self._name = ""
        self._in_file = False
        self._field = bytearray()
        self._complete = False

    def feed(self, piece: bytes) -> list[Event]:
        """Return what a piece completes. Raises: ApiError."""
        if piece and not self._complete:
            if self._opening is not None:
                piece = self._open(self._opening + piece)
            try:
                self._parser.write(piece)
            except FormParserError:
                raise _malformed("a delimiter or a part header is not as it must be") from None
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Raise ApiError unless the form was complete."""
        if not self._complete:
            raise _malformed("it ended before its last boundary")

    def _open(self, opening: bytes) -> bytes:
        """Return what the parser may have of the body's first bytes, nothing while they are too few to be judged.

        A preamble is refused: clients send none, and the parser's idea of it depends on how the body is cut.
        """
        start = opening.removeprefix(b"\r\n")
        if len(start) < len(self._delimiter) and self._delimiter.startswith(start.removeprefix(b"\r")):
            self._opening = opening
            return b""
        if not start.startswith(self._delimiter):
            raise _malformed("it does not begin with its boundary")
        self._opening = None
        return start

    # Parser callbacks

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._disposition = None
        self._in_file = False
        self._field.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        header, value = self._header.lower(), self._value
        self._header = self._value = b""
        if header == b"content-disposition":
            if self._disposition is not None:
                raise _malformed("a part has two Content-Disposition headers")
            self._disposition = value.decode("latin-1")
        elif header == b"content-transfer-encoding" and value.strip().lower() not in (b"binary", b"8bit", b"7bit"):
            raise _malformed("a part has a Content-Transfer-Encoding; send its bytes as they are")

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._disposition)
        try:
            name = options[b"name"].decode()
            filename = options[b"filename"].decode() if b"filename" in options else None
        except KeyError:
            raise _malformed("a part has no name") from None
        except UnicodeDecodeError:
            raise _malformed("a name in it is not UTF-8 text") from None
        if kind != b"form-data":
            raise _malformed("a part's Content-Disposition is not form-data")
        if name in self._names:
            raise ApiError(400, "a form field was given twice", code="invalid_value", param=shown(name))
        self._names.add(name)
        self._name = name
        if filename is not None and name != "file":
            raise ApiError(400, "the file belongs into the form field 'file'", code="invalid_value", param=shown(name))
        if filename is None and name == "file":
            raise ApiError(400, "'file' must be a file with a filename", code="invalid_value", param="file")
        if filename is not None:
            self._in_file = True
            self._events.append(FileStart(filename))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._events.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise ApiError(
                400, f"a form field is longer than {MAX_FIELD_BYTES} bytes", code="invalid_value",
                param=shown(self._name),
            )  # fmt: skip

    def _part_ends(self) -> None:
        if self._in_file:
            self._events.append(FileEnd())
            return
        try:
            self._events.append(Field(self._name, self._field.decode()))
        except UnicodeDecodeError:
            raise ApiError(
                400, "a form field is not UTF-8 text", code="invalid_value", param=shown(self._name)
            ) from None

    def _form_ends(self) -> None:
        self._complete = True


def shown(name: str) -> str | None:
    """Return a field's name, cut, as an error's ``param``."""
    return name[:64] or None


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data":
        raise ApiError(
            400, "expected a Content-Type of multipart/form-data with the fields file and purpose",
            code="invalid_content_type",
        )  # fmt: skip
    if (
        not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES
        or not boundary.decode("latin-1").isprintable()
        or not boundary.isascii()
    ):
        raise _malformed(f"its boundary must have 1 to {MAX_BOUNDARY_BYTES} printable characters")
    return boundary


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"malformed multipart form: {why}", code="invalid_multipart")
