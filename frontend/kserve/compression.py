"""Compressed bodies over HTTP: gzip and deflate in, with a cap on what they inflate to, and out where asked for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from engines.errors import InvalidInput, TooLarge, Unsupported
from frontend.kserve.raw_data import Buffer

Encoding = Literal["gzip", "deflate", "identity"]

ACCEPTED: Final = "gzip, deflate"
"""Value of the ``Accept-Encoding`` header that goes with a refused encoding."""
_GZIP_BITS: Final = 31
_ZLIB_BITS: Final = 15
_WINDOW_BITS: Final[dict[str, int]] = {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": _ZLIB_BITS}
MIN_COMPRESSED_BYTES: Final = 1024
"""Shorter answers go as they are: they fit one packet either way, and zlib takes as long for one as a frontend takes
for all else."""
_MAX_MEMBERS: Final = 16
"""Members of a gzip body: each costs a copy of what follows it, so a body of many empty ones would cost minutes."""
_LEVEL: Final = 1
"""The fastest: tensors hardly shrink further at higher levels, and compressing runs on the event loop."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """How a client takes answers: in ``encoding`` from ``min_bytes`` on, below as they are."""

    encoding: Encoding = "identity"
    min_bytes: int = MIN_COMPRESSED_BYTES

    def for_size(self, size: int) -> Encoding:
        """Return the encoding of an answer of ``size`` bytes."""
        return self.encoding if size >= self.min_bytes else "identity"


ANYTHING: Final = Accepted()
"""What a client accepts that says nothing of it: answers as they are."""


def decompress(body: Buffer, encoding: str, limit_bytes: int) -> Buffer:
    """Return the body without its ``Content-Encoding``; never holds more than ``limit_bytes`` + 1 of it.

    ``deflate`` is the zlib format. A gzip body may consist of several members.

    Raises:
        Unsupported: another encoding; answer with the header ``Accept-Encoding: gzip, deflate``.
        InvalidInput: damaged, cut short, or followed by something else.
        TooLarge: it inflates to more than ``limit_bytes``.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    window_bits = _WINDOW_BITS.get(name)
    if window_bits is None:
        raise Unsupported(f"Unsupported compression type '{encoding[:80]}', expected gzip, deflate or identity")
    parts: list[bytes] = []
    size = 0
    rest: Buffer = body
    for _ in range(_MAX_MEMBERS):
        inflater = zlib.decompressobj(window_bits)
        try:
            part = inflater.decompress(rest, limit_bytes + 1 - size)
        except zlib.error as error:
            raise InvalidInput(f"failed to decompress the {name} request body: {error}") from error
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            raise TooLarge(
                f"the {name} request body inflates to more than the maximum allowed input size: "
                f"max_request_bytes is {limit_bytes}"
            )
        if not inflater.eof:
            raise InvalidInput(f"failed to decompress the {name} request body: it ends too early")
        rest = inflater.unused_data
        if not rest:
            return parts[0] if len(parts) == 1 else b"".join(parts)
        if window_bits == _ZLIB_BITS:
            raise InvalidInput(f"failed to decompress the {name} request body: {len(rest)} bytes follow its end")
    raise InvalidInput(f"failed to decompress the {name} request body: more than {_MAX_MEMBERS} members")


def read_accepted(accept_encoding: bytes | None) -> Accepted:
    """Return what an ``Accept-Encoding`` value, if there is one, likes best; of equal weights the first wins.

    Only gzip, deflate and identity count, ``*`` does not but to refuse identity; identity if nothing is acceptable.
    """
    if accept_encoding is None:
        return ANYTHING
    best: Encoding = "identity"
    best_weight = 0.0
    weights: dict[str, float] = {}
    for item in accept_encoding.decode("latin-1").split(","):
        name, _, arguments = item.partition(";")
        name = name.strip().lower()
        weight = weights[name] = _weight(arguments)
        if weight > best_weight:
            match name:
                case "gzip" | "x-gzip":
                    best, best_weight = "gzip", weight
                case "deflate":
                    best, best_weight = "deflate", weight
                case "identity":
                    best, best_weight = "identity", weight
    refused = weights.get("identity", weights.get("*", 1.0)) == 0.0
    return Accepted(best, 0 if refused else MIN_COMPRESSED_BYTES)


def compress(parts: Sequence[Buffer], encoding: Encoding) -> list[Buffer]:
    """Return the parts of a body under a ``Content-Encoding``."""
    if encoding == "identity":
        return list(parts)
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    packed: list[Buffer] = [deflater.compress(part) for part in parts]
    packed.append(deflater.flush())
    return [part for part in packed if part]


def _weight(arguments: str) -> float:
    for argument in arguments.split(";"):
        key, _, value = argument.partition("=")
        if key.strip().lower() == "q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0.0 <= weight <= 1.0 else 0.0
    return 1.0
