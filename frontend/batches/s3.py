"""Objects in an S3-compatible bucket, through obstore (extra ``s3``).

Bucket and prefix come from the settings; region, endpoint and credentials from the usual ``AWS_*`` variables of the
process, so that no secret is in a file of ours. An object appears when its upload is completed; what a dead writer
uploaded is invisible and is removed by the bucket's rule for incomplete multipart uploads, which operators should set.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import timedelta
from typing import Any, Final

from engines.errors import Unsupported
from frontend.batches.objects import READ_BYTES, ObjectMissing, StorageUnavailable, Written, check_path

log = logging.getLogger(__name__)

PART_BYTES: Final = 8 * 1024 * 1024
RETRIES: Final = 3
RETRY_TIMEOUT_S: Final = 15
"""An outage is told to whoever waits instead of being waited out: obstore's own limit is three minutes."""
PARTS_IN_FLIGHT: Final = 2
"""A writer holds at most this many parts beyond the one that it fills."""


class BucketObjects:
    """Provides ``Objects`` over an obstore store."""

    def __init__(self, bucket: str, prefix: str, store: Any = None) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._store = store

    async def start(self) -> None:
        """Connect and look into the bucket once.

        Raises:
            Unsupported: obstore is not installed.
            StorageUnavailable: the bucket cannot be listed; other calls may be tried all the same.
        """
        if self._store is None:
            try:
                from obstore.store import S3Store
            except ImportError as error:
                raise Unsupported("s3:// storage needs the package obstore: install ringserve[s3]") from error
            self._store = S3Store(
                self._bucket,
                prefix=self._prefix or None,
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)},
            )
        await self._require_bucket()

    async def close(self) -> None:
        self._store = None

    async def open_writer(self, path: str) -> BucketWriter:
        return BucketWriter(self._store, check_path(path))

    async def open_reader(self, path: str, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        check_path(path)
        if length is None:
            size = await self.size(path)
            if size is None:
                raise ObjectMissing("a stored file is not there")
            length = max(0, size - offset)
        while length > 0:
            # Ranged reads instead of one open response: a client may take hours to read, a bucket's answer may not.
            piece = await self.read(path, offset, min(length, PART_BYTES))
            offset += len(piece)
            length -= len(piece)
            for start in range(0, len(piece), READ_BYTES):
                yield piece[start : start + READ_BYTES]

    async def read(self, path: str, offset: int, length: int) -> bytes:
        import obstore

        check_path(path)
        if length == 0:
            return b""
        try:
            data = bytes(await obstore.get_range_async(self._store, path, start=offset, length=length))
        except FileNotFoundError:
            await self._require_bucket()
            raise ObjectMissing("a stored file is not there") from None
        except Exception as error:
            if await self._shorter(path, offset + length):
                raise ObjectMissing("a stored file is shorter than its record says") from error
            raise _unavailable(error) from error
        if len(data) != length:
            raise ObjectMissing("a stored file is shorter than its record says")
        return data

    async def size(self, path: str) -> int | None:
        import obstore

        check_path(path)
        try:
            return int((await obstore.head_async(self._store, path))["size"])
        except FileNotFoundError:
            await self._require_bucket()
            return None
        except Exception as error:
            raise _unavailable(error) from error

    async def delete(self, path: str) -> None:
        import obstore

        check_path(path)
        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return
        except Exception as error:
            raise _unavailable(error) from error

    async def sweep_temporary(self, older_than_seconds: float) -> int:
        return 0

    async def _require_bucket(self) -> None:
        """Raise StorageUnavailable unless the bucket is there: in one that is not, every object looks lost."""
        import obstore

        try:
            async for _ in obstore.list(self._store, chunk_size=1):
                return
        except Exception as error:
            _log_failure(error)
            raise StorageUnavailable(
                f"the bucket s3://{self._bucket} cannot be listed: does it exist, and do AWS_ENDPOINT_URL, AWS_REGION"
                " and the credentials of this process fit?"
            ) from error

    async def _shorter(self, path: str, end: int) -> bool:
        try:
            size = await self.size(path)
        except StorageUnavailable:
            return False
        return size is not None and size < end


class BucketWriter:
    """Provides ``ObjectWriter``: one streamed put, fed part by part, that is completed or given up."""

    def __init__(self, store: Any, path: str) -> None:
        self._store = store
        self._path = path
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._part = bytearray()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(PARTS_IN_FLIGHT)
        self._put: asyncio.Task[None] | None = None
        self._over = False

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)
        self._bytes += len(data)
        self._part += data
        if len(self._part) >= PART_BYTES:
            part, self._part = bytes(self._part), bytearray()
            await self._hand_over(part)

    async def commit(self) -> Written:
        if self._put is None:
            # Small: one request, no multipart upload that could be left open.
            await _put_whole(self._store, self._path, bytes(self._part))
        else:
            if self._part:
                await self._hand_over(bytes(self._part))
            await self._hand_over(None)
            await self._settled()
        self._over = True
        return Written(self._bytes, self._hash.hexdigest())

    async def abort(self) -> None:
        if self._over:
            return
        self._over = True
        put, self._put = self._put, None
        if put is not None:
            put.cancel()
            await asyncio.wait([put])
            if not put.cancelled() and (error := put.exception()) is not None:
                log.info("objects.upload_given_up error=%s", type(error).__name__)
        import obstore

        try:
            # A put that was completing when it was cancelled may have won.
            await obstore.delete_async(self._store, self._path)
        except FileNotFoundError:
            return
        except Exception as error:
            log.warning("objects.left_behind object=%s error=%s", self._path, type(error).__name__)

    async def _hand_over(self, part: bytes | None) -> None:
        if self._put is None:
            self._put = asyncio.get_running_loop().create_task(self._upload())
        waiting = asyncio.ensure_future(self._parts.put(part))
        await asyncio.wait([waiting, self._put], return_when=asyncio.FIRST_COMPLETED)
        if self._put.done() and not waiting.done():
            waiting.cancel()
        if self._put.done():
            await self._settled()

    async def _settled(self) -> None:
        assert self._put is not None
        try:
            await self._put
        except StorageUnavailable:
            raise
        except Exception as error:
            raise _unavailable(error) from error

    async def _upload(self) -> None:
        import obstore

        await obstore.put_async(
            self._store, self._path, self._stream(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=2
        )

    async def _stream(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part


async def _put_whole(store: Any, path: str, data: bytes) -> None:
    import obstore

    try:
        await obstore.put_async(store, path, data, use_multipart=False)
    except Exception as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> StorageUnavailable:
    _log_failure(error)
    return StorageUnavailable("the file storage cannot be used now; nothing was stored")


def _log_failure(error: Exception) -> None:
    # obstore's texts may hold signed addresses: the class says enough, and the bucket's own log has the rest.
    log.error("objects.failed error=%s", type(error).__name__)
