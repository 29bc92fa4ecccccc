"""The two storages answer alike: whole objects or none, exact ranges, clear errors."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from frontend.batches import local
from frontend.batches.local import LocalObjects
from frontend.batches.objects import (
    READ_BYTES,
    BadObjectPath,
    ObjectMissing,
    Objects,
    StorageUnavailable,
    object_path,
    open_objects,
)
from frontend.batches.s3 import PART_BYTES, BucketObjects
from frontend.gateway_settings import FileSettings, GatewaySettings

PATH = object_path("file-" + "ab" * 16)
Use = Callable[[Objects], Awaitable[None]]


def with_storage(kind: str, directory: Path, use: Use) -> None:
    async def run() -> None:
        objects: Objects
        if kind == "local":
            objects = LocalObjects(directory)
        else:
            from obstore.store import MemoryStore

            objects = BucketObjects("bucket", "", MemoryStore())
        await objects.start()
        try:
            await use(objects)
        finally:
            await objects.close()

    asyncio.run(run())


async def put(objects: Objects, data: bytes, path: str = PATH) -> None:
    writer = await objects.open_writer(path)
    await writer.write(data)
    await writer.commit()


async def collect(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def temporary_files(directory: Path) -> list[Path]:
    return list((directory / "tmp").iterdir())


both = pytest.mark.parametrize("kind", ["local", "bucket"])


@both
def test_an_object_is_invisible_until_commit_and_then_whole(kind: str, tmp_path: Path) -> None:
    data = os.urandom(3 * PART_BYTES + 17)

    async def use(objects: Objects) -> None:
        writer = await objects.open_writer(PATH)
        for start in range(0, len(data), 1_000_003):
            await writer.write(memoryview(data)[start : start + 1_000_003])
        assert await objects.size(PATH) is None
        written = await writer.commit()
        assert (written.bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert await objects.size(PATH) == len(data)
        pieces = [piece async for piece in objects.open_reader(PATH)]
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= READ_BYTES
        await writer.abort()  # harmless after commit
        assert await objects.size(PATH) == len(data)

    with_storage(kind, tmp_path, use)


@both
def test_ranges_are_exact(kind: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 2048

    async def use(objects: Objects) -> None:
        await put(objects, data)
        assert await objects.read(PATH, 100, 57) == data[100:157]
        assert await objects.read(PATH, 5, 0) == b""
        assert await collect(objects.open_reader(PATH, 300_000)) == data[300_000:]
        assert await collect(objects.open_reader(PATH, 7, READ_BYTES + 1)) == data[7 : 8 + READ_BYTES]
        with pytest.raises(ObjectMissing, match="shorter"):
            await objects.read(PATH, len(data) - 1, 2)
        with pytest.raises(ObjectMissing, match="shorter"):
            await collect(objects.open_reader(PATH, 0, len(data) + 1))

    with_storage(kind, tmp_path, use)


@both
def test_an_aborted_write_leaves_nothing(kind: str, tmp_path: Path) -> None:
    async def use(objects: Objects) -> None:
        for size in (0, 10, 2 * PART_BYTES + 1):
            writer = await objects.open_writer(PATH)
            await writer.write(b"x" * size)
            await writer.abort()
            await writer.abort()
            assert await objects.size(PATH) is None
        if kind == "local":
            assert temporary_files(tmp_path) == []

    with_storage(kind, tmp_path, use)


@both
def test_a_missing_object_is_said_to_be_missing(kind: str, tmp_path: Path) -> None:
    async def use(objects: Objects) -> None:
        assert await objects.size(PATH) is None
        with pytest.raises(ObjectMissing, match="not there"):
            await objects.read(PATH, 0, 1)
        with pytest.raises(ObjectMissing, match="not there"):
            await collect(objects.open_reader(PATH))
        await objects.delete(PATH)
        await put(objects, b"abc")
        await objects.delete(PATH)
        assert await objects.size(PATH) is None

    with_storage(kind, tmp_path, use)


@both
@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", "a/../b", ".hidden", "a/.b", "", "a\\b", "a\n", "ä"])
def test_no_path_leaves_the_storage(kind: str, path: str, tmp_path: Path) -> None:
    async def use(objects: Objects) -> None:
        with pytest.raises(BadObjectPath):
            await objects.open_writer(path)
        with pytest.raises(BadObjectPath):
            await collect(objects.open_reader(path))
        with pytest.raises(BadObjectPath):
            await objects.delete(path)

    with_storage(kind, tmp_path, use)


def test_a_full_disk_is_unavailable_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def use(objects: Objects) -> None:
        writer = await objects.open_writer(PATH)
        await writer.write(b"abc")
        monkeypatch.setattr(local.os, "fsync", full)
        with pytest.raises(StorageUnavailable, match="full"):
            await writer.commit()
        monkeypatch.undo()
        await writer.abort()
        assert temporary_files(tmp_path) == []
        assert await objects.size(PATH) is None

    with_storage("local", tmp_path, use)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_write_that_finds_the_disk_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(objects: Objects) -> None:
        monkeypatch.setattr(local, "_create", lambda _: full)
        writer = await objects.open_writer(PATH)
        with pytest.raises(StorageUnavailable, match="full"):
            await writer.write(b"abc")
        await writer.abort()
        assert full.closed

    with Path("/dev/full").open("wb", buffering=0) as full:
        with_storage("local", tmp_path, use)


def test_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    async def use(objects: Objects) -> None:
        for name, age_s in (("old.part", local.STALE_SECONDS + 60), ("new.part", 0.0)):
            path = tmp_path / "tmp" / name
            path.write_bytes(b"x")
            stamp = path.stat().st_mtime - age_s
            os.utime(path, (stamp, stamp))
        assert await objects.sweep_temporary(local.STALE_SECONDS) == 1
        assert [path.name for path in temporary_files(tmp_path)] == ["new.part"]

    with_storage("local", tmp_path, use)


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    async def use(objects: Objects) -> None:
        await put(objects, b"abc")
        assert (tmp_path / "files" / PATH).stat().st_mode & 0o077 == 0
        assert (tmp_path / "files").stat().st_mode & 0o077 == 0

    with_storage("local", tmp_path / "files", use)


def test_the_url_names_the_storage(tmp_path: Path) -> None:
    def opened(url: str) -> Objects:
        return open_objects(GatewaySettings(files=FileSettings(url=url)), tmp_path)

    assert isinstance(opened(""), LocalObjects)
    assert isinstance(opened(f"file://{tmp_path}/my%20files"), LocalObjects)
    assert isinstance(opened("s3://bucket/some/prefix"), BucketObjects)
    for url in ("http://x/y", "s3://", "file://host/dir", "relative/dir", "s3://key:secret@bucket"):
        with pytest.raises(ValueError, match=r"gateway\.files\.url"):
            opened(url)


class _NoBucket(BaseHTTPRequestHandler):
    """An S3 service without the bucket that is asked for."""

    def do_GET(self) -> None:
        body = b"<?xml version='1.0'?><Error><Code>NoSuchBucket</Code><BucketName>gone</BucketName></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def test_a_bucket_that_is_not_there_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for missing objects, a wrong endpoint would end every batch for the loss of its input."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _NoBucket)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}"), ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "s3cr3t"), ("AWS_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    objects = BucketObjects("gone", "prefix")

    async def use() -> None:
        for call in (objects.start, lambda: objects.size(PATH), lambda: objects.read(PATH, 0, 10)):
            with pytest.raises(StorageUnavailable, match=r"s3://gone cannot be listed: does it exist") as caught:
                await call()
            assert "s3cr3t" not in str(caught.value)
        writer = await objects.open_writer(PATH)
        await writer.write(b"x")
        with pytest.raises(StorageUnavailable):
            await writer.commit()
        await objects.close()

    try:
        asyncio.run(use())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
