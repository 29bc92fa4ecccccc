"""Whole-file validation of a batch input in one streaming pass, which also writes the private copy and its index.

All or nothing: every line is good, or nothing is kept and the report says which lines are not, by code and physical
line, in fixed words. What a line contains is never quoted: reports travel to logs and tickets.

The pass runs piece by piece in threads of its own. Memory is one piece, one line, 16 bytes per line of index and about
100 bytes per line of custom_id digests, whatever the file's size.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import Raw

from engines.errors import InvalidInput
from frontend.batches.line_contracts import NOT_OBJECT, Checked, Contract, Fault, check_body
from frontend.batches.objects import ObjectCorrupt, Objects, Written
from frontend.batches.work_file import IndexBuilder

MAX_FAULTS: Final = 20
"""The scan stops when the report has this many entries."""
MAX_CUSTOM_ID_BYTES: Final = 512
VALIDATION_THREADS: Final = 2
MAX_VALIDATIONS: Final = 8
"""Files validated at once per process; further ones wait."""
MIXED: Final = "mixed"
"""``public_model`` of a batch with several models."""
_BOM: Final = b"\xef\xbb\xbf"

ModelAnswer = Literal["ok", "not_found", "unsupported"]
Models = Callable[[str, str], ModelAnswer]
"""Says whether the endpoint's model is there and serves it. Called from a thread, once per model and file."""


@dataclass(frozen=True, slots=True)
class LineFault:
    """One entry of the report; ``line`` is the 1-based physical line of the uploaded file."""

    code: str
    message: str
    line: int


class InvalidBatchInput(InvalidInput):
    """The file is not a valid batch input; nothing was kept.

    Attributes:
        faults: at least one, at most ``MAX_FAULTS``, in file order.
    """

    def __init__(self, faults: tuple[LineFault, ...]) -> None:
        some = f"{len(faults)} lines" if len(faults) > 1 else "1 line"
        more = " or more" if len(faults) == MAX_FAULTS else ""
        super().__init__(f"The input file has errors in {some}{more}; see errors.data. No batch was created.")
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Rules:
    """What a line must satisfy.

    Attributes:
        require_max_tokens: generation lines must name an output maximum above 0 (workspaces with budgets).
        max_tokens_ceiling: largest output maximum; None for no limit.
    """

    contract: Contract
    models: Models
    max_lines: int
    max_line_bytes: int
    require_max_tokens: bool = False
    max_tokens_ceiling: int | None = None


@dataclass(frozen=True, slots=True)
class Validated:
    """A good input: its private copy, complete and durable, and what a batch records of it.

    ``counts``: lines of each of ``models``.
    """

    written: Written
    lines: int
    models: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def public_model(self) -> str:
        return self.models[0] if len(self.models) == 1 else MIXED


class _Line(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: Raw


class _LooseLine(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    custom_id: Raw
    method: Raw
    url: Raw
    body: Raw


_line: Final = msgspec.json.Decoder(_Line)
_loose: Final = msgspec.json.Decoder(_LooseLine)
_any: Final = msgspec.json.Decoder(Raw)
_INVALID_JSON: Final = ("invalid_json", "The line is not valid JSON.")
_INVALID_ID: Final = ("invalid_custom_id", f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_BYTES} bytes.")
_INVALID_METHOD: Final = ("invalid_method", "method must be POST.")
_DUPLICATE: Final = ("duplicate_custom_id", "custom_id was used before in this file.")
_NO_MAXIMUM: Final = ("missing_max_tokens", "The body must limit its output tokens to a number above 0.")
_NOT_FOUND: Final = ("model_not_found", "The model does not exist or is not available to this key.")
_UNSUPPORTED: Final = ("model_unsupported", "The model does not serve this endpoint.")


class Validator:
    """Takes the file in pieces of any size, gives back what belongs in the private copy. Pure but for ``models``.

    Attributes:
        faults: so far.
        over: nothing more needs to be read: the report is full, or a limit ended the scan.
        index: of the lines accepted so far.
    """

    def __init__(self, rules: Rules) -> None:
        self.faults: list[LineFault] = []
        self.over = False
        self.index = IndexBuilder()
        self._rules = rules
        self._rest = bytearray()
        self._physical = 0
        self._requests = 0
        self._seen: set[bytes] = set()
        self._models: set[str] = set()
        # Keyed, so that nobody can prepare identifiers that collide.
        self._hash_key = secrets.token_bytes(16)

    def feed(self, piece: bytes) -> bytes:
        """Return the copy's next bytes; nothing once there is a fault."""
        if self.over:
            return b""
        lines = piece.split(b"\n")
        if len(lines) == 1:
            self._keep(piece)
            return b""
        if self._rest:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        last = lines.pop()
        out: list[bytes] = []
        for line in lines:
            if not self._take(line, out):
                return b""
        self._keep(last)
        return b"" if self.faults or not out else b"\n".join(out) + b"\n"

    def finish(self) -> bytes:
        """Take the last line, which may have no newline; return the rest of the copy with its index.

        Raises:
            InvalidBatchInput: there are faults, or there was no request at all.
        """
        out: list[bytes] = []
        if self._rest and not self.over:
            self._take(bytes(self._rest), out)
            self._rest.clear()
        if not self._requests and not self.faults:
            self.faults.append(LineFault("empty_file", "The file holds no request.", 1))
        if self.faults:
            raise InvalidBatchInput(tuple(self.faults))
        return b"".join([line + b"\n" for line in out]) + self.index.finish()

    def _keep(self, part: bytes) -> None:
        self._rest += part
        # A margin for what is trimmed off: a BOM and a carriage return.
        if len(self._rest) > self._rules.max_line_bytes + 4:
            self._physical += 1
            self._too_large()

    def _take(self, line: bytes, out: list[bytes]) -> bool:
        """Return whether to go on."""
        self._physical += 1
        if self._physical == 1:
            line = line.removeprefix(_BOM)
        if len(line) > self._rules.max_line_bytes and len(line.removesuffix(b"\r")) > self._rules.max_line_bytes:
            self._too_large()
            return False
        line = line.strip()
        if not line:
            return True
        if self._requests == self._rules.max_lines:
            most = self._rules.max_lines
            self._fault(("too_many_lines", f"The file has more than {most} requests; reading stopped here."))
            self.over = True
            return False
        self._requests += 1
        checked = self._check(line)
        if isinstance(checked, Checked):
            if not self.faults:
                self.index.add(line, checked.model)
                out.append(line)
            return True
        self._fault(checked)
        return not self.over

    def _check(self, line: bytes) -> Checked | Fault:
        try:
            if not line.isascii():
                line.decode()
            request = _line.decode(line)
        except (UnicodeDecodeError, RecursionError):
            return _INVALID_JSON
        except msgspec.DecodeError:
            return _diagnosis(line)
        rules = self._rules
        custom_id = request.custom_id.encode()
        if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_BYTES:
            return _INVALID_ID
        # Remembered also if a later check fails: one report then names every clash.
        digest = hashlib.blake2b(custom_id, digest_size=16, key=self._hash_key).digest()
        known = len(self._seen)
        self._seen.add(digest)
        if request.method != "POST":
            return _INVALID_METHOD
        if request.url != rules.contract.endpoint:
            return "invalid_url", "url must be the endpoint of the batch."
        checked = check_body(rules.contract, request.body)
        if not isinstance(checked, Checked):
            return checked
        if rules.require_max_tokens and rules.contract.generates and not checked.max_tokens:
            return _NO_MAXIMUM
        if len(self._seen) == known:
            return _DUPLICATE
        if (fault := self._check_model(checked.model)) is not None:
            return fault
        ceiling = rules.max_tokens_ceiling
        if ceiling is not None and checked.max_tokens is not None and checked.max_tokens > ceiling:
            return "max_tokens_too_large", f"The output maximum is above the limit of {ceiling} tokens."
        return checked

    def _check_model(self, model: str) -> Fault | None:
        if model in self._models:
            return None
        match self._rules.models(self._rules.contract.endpoint, model):
            case "ok":
                self._models.add(model)
                return None
            case "not_found":
                return _NOT_FOUND
            case "unsupported":
                return _UNSUPPORTED

    def _too_large(self) -> None:
        most = self._rules.max_line_bytes
        self._fault(("line_too_large", f"The line is longer than {most} bytes; reading stopped here."))
        self.over = True

    def _fault(self, fault: Fault) -> None:
        self.faults.append(LineFault(*fault, self._physical))
        self.over = self.over or len(self.faults) == MAX_FAULTS


class InputCheck:
    """Validates stored inputs, at most ``MAX_VALIDATIONS`` at once, off the event loop."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._pool: ThreadPoolExecutor | None = None
        self._turn = asyncio.Semaphore(MAX_VALIDATIONS)

    async def start(self) -> None:
        self._pool = ThreadPoolExecutor(VALIDATION_THREADS, "validation")

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    async def copy_validated(self, source_path: str, source: Written, copy_path: str, rules: Rules) -> Validated:
        """Return the private copy of a good input, written to ``copy_path`` in the format of ``work_file``.

        Args:
            source: size and checksum that the input had when it was stored.

        Raises:
            InvalidBatchInput: with the report; nothing is left at ``copy_path``.
            ObjectMissing, ObjectCorrupt: the input is not what was uploaded.
            StorageUnavailable: it cannot be read, or the copy not be written.
        """
        async with self._turn:
            writer = await self._objects.open_writer(copy_path)
            try:
                validator = Validator(rules)
                digest = hashlib.sha256()
                async with contextlib.aclosing(self._objects.open_reader(source_path, 0, source.bytes)) as pieces:
                    async for piece in pieces:
                        out = await self._run(lambda: _step(validator, digest, piece))  # noqa: B023 - awaited at once
                        if out:
                            await writer.write(out)
                        if validator.over:
                            break
                if not validator.over and digest.hexdigest() != source.sha256:
                    raise ObjectCorrupt("the stored input is not what was uploaded; upload it again")
                await writer.write(await self._run(validator.finish))
                written = await writer.commit()
            except BaseException:
                await writer.abort()
                raise
        index = validator.index
        return Validated(written, index.lines, index.models, index.counts)

    async def _run(self, call: Callable[[], bytes]) -> bytes:
        assert self._pool is not None, "not started"
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


def _step(validator: Validator, digest: hashlib._Hash, piece: bytes) -> bytes:
    digest.update(piece)
    return validator.feed(piece)


def _diagnosis(line: bytes) -> Fault:
    """Return the first fault of a line that does not have the plain form."""
    try:
        _any.decode(line)
        loose = _loose.decode(line)
    except RecursionError:
        return _INVALID_JSON
    except msgspec.ValidationError:
        return NOT_OBJECT
    except msgspec.DecodeError:
        return _INVALID_JSON
    if bytes(memoryview(loose.body)[:1]) != b"{":
        return NOT_OBJECT
    for value, fault in (
        (loose.custom_id, _INVALID_ID),
        (loose.method, _INVALID_METHOD),
        (loose.url, ("invalid_url", "url must be the endpoint of the batch.")),
    ):
        if bytes(memoryview(value)[:1]) != b'"':
            return fault
    # Texts that do not decode, such as one with half a surrogate pair.
    return _INVALID_JSON
