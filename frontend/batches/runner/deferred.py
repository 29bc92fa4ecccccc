"""Batches that were created before their input was read (``batch_validation: async``): validated by their runner."""

from __future__ import annotations

import logging
import secrets
from typing import Final

import msgspec

from frontend.batches.line_contracts import contract_of
from frontend.batches.objects import ObjectCorrupt, ObjectMissing, Objects, Written, object_path
from frontend.batches.runner.outage import Persistence
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import BatchRow, FileRow, NewFile, TerminalState, WrittenFile
from frontend.batches.validation import InputCheck, InvalidBatchInput, Models, Rules, Validated
from frontend.gateway_settings import BatchSettings

log = logging.getLogger("batches")

ERROR_CODE: Final = "invalid_batch_input"


class Intake:
    """Validates deferred inputs."""

    def __init__(
        self,
        store: Store,
        objects: Objects,
        check: InputCheck,
        models: Models,
        settings: BatchSettings,
        persistence: Persistence,
    ) -> None:
        self._store = store
        self._objects = objects
        self._check = check
        self._models = models
        self._settings = settings
        self._persistence = persistence

    async def accept(self, runner_id: str, batch: BatchRow) -> BatchRow | None:
        """Return the batch with its private copy; None if it ended as ``failed`` with the report, or is not ours."""
        insist = self._persistence.insist
        if batch.cancel_requested_at is not None:
            await self._finish(runner_id, batch, "cancelled", None)
            return None
        source = await insist(lambda: self._store.files.get_internal(batch.input_file_id))
        if source is None or source.storage_path is None:
            await self._finish(
                runner_id, batch, "failed", _report([("input_unavailable", "The input file is gone.", 1)])
            )
            return None
        try:
            work, validated = await insist(lambda: self._copy(batch, source))
        except InvalidBatchInput as invalid:
            await self._refuse(runner_id, batch, [(f.code, f.message, f.line) for f in invalid.faults])
            return None
        except (ObjectMissing, ObjectCorrupt) as error:
            await self._refuse(runner_id, batch, [("input_unavailable", str(error), 1)])
            return None
        accepted = await insist(
            lambda: self._store.runner.accept_input(runner_id, batch.id, work, validated.lines, validated.public_model)
        )
        return await insist(lambda: self._store.batches.get(None, batch.id)) if accepted else None

    async def _copy(self, batch: BatchRow, source: FileRow) -> tuple[WrittenFile, Validated]:
        """Write the private copy, under a new id each time: one that came to nothing is swept."""
        contract = contract_of(batch.endpoint)
        assert contract is not None and source.storage_path is not None, "not a batch that create lets in"
        rules = Rules(contract, self._models, self._settings.max_lines, self._settings.max_line_bytes)
        copy_id = "file-" + secrets.token_hex(16)
        path = object_path(copy_id)
        file = NewFile(
            copy_id, batch.workspace_id, "batch_input", None, "work.jsonl", "application/octet-stream", path,
            batch.api_key_id, batch.user_id,
        )  # fmt: skip
        await self._store.files.insert(file)
        stored = Written(source.bytes, source.sha256)
        validated = await self._check.copy_validated(source.storage_path, stored, path, rules)
        return WrittenFile(copy_id, validated.written.bytes, validated.written.sha256), validated

    async def _refuse(self, runner_id: str, batch: BatchRow, faults: list[tuple[str, str, int]]) -> None:
        await self._finish(runner_id, batch, "failed", _report(faults))

    async def _finish(self, runner_id: str, batch: BatchRow, state: TerminalState, report: str | None) -> None:
        log.info("batch.not_accepted batch=%s state=%s", batch.id, state)
        ended = await self._persistence.insist(
            lambda: self._store.runner.finalize(
                runner_id, batch.id, state, error_code=ERROR_CODE if report else None, errors=report
            )
        )
        if ended is not None:
            await self._persistence.insist(lambda: self._store.runner.settle(runner_id, batch.id))


def _report(faults: list[tuple[str, str, int]]) -> str:
    data = [{"code": code, "message": message, "line": line, "param": None} for code, message, line in faults]
    return msgspec.json.encode({"object": "list", "data": data}).decode()
