"""What breaks under the API: full disks, lost and damaged objects, crashes between two steps. Nothing is half-kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest
from live_gateway import LiveGateway, live_gateway
from test_batches_api import create, line, put
from test_files_api import refusal, refused, upload

import openai
from frontend.batches import local
from frontend.batches.sweeper import ABANDONED_SECONDS


@pytest.fixture
def fragile(tmp_path: Any) -> Iterator[LiveGateway]:
    """A gateway of the test's own: it will be broken."""
    with live_gateway(tmp_path) as running:
        yield running


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["create", "write", "publish"])
def test_a_full_disk_refuses_an_upload_and_keeps_nothing(
    fragile: LiveGateway, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    client = fragile.client()
    if step == "create":
        monkeypatch.setattr(local, "_create", full)
    elif step == "write":
        monkeypatch.setattr(local.LocalWriter, "_append", full)
    else:
        monkeypatch.setattr(local, "_sync_directory", full)
    with pytest.raises(openai.InternalServerError) as caught:
        upload(client, b"{" * 300_000)
    assert refusal(caught.value) == (503, "file_storage_unavailable", None)
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert "x-should-retry" not in caught.value.response.headers
    monkeypatch.undo()
    assert fragile.stored() == []
    assert list(client.files.list()) == []
    assert fragile.run(fragile.store.files.to_sweep(10, 0)) == ()
    assert upload(client).bytes > 0


def test_a_full_disk_refuses_a_batch_and_keeps_nothing(fragile: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    client = fragile.client()
    input_id = put(client, line("a"))
    before = fragile.stored()
    monkeypatch.setattr(local, "_sync_directory", full)
    assert refused(lambda: create(client, input_id)) == (503, "file_storage_unavailable", None)
    monkeypatch.undo()
    assert fragile.stored() == before
    assert list(client.batches.list()) == []
    assert fragile.run(fragile.store.files.to_sweep(10, 0)) == ()
    create(client, input_id)


def test_a_lost_object_is_said_to_be_lost(fragile: LiveGateway) -> None:
    client = fragile.client()
    file = upload(client, line("a"))
    (fragile.files_dir / file.id[-2:] / file.id).unlink()
    assert refused(lambda: client.files.content(file.id)) == (500, "file_content_missing", None)
    assert refused(lambda: create(client, file.id)) == (500, "file_content_missing", None)
    assert client.files.delete(file.id).deleted


@pytest.mark.parametrize("fault", ["flipped", "cut"])
def test_a_damaged_object_is_never_passed_off_as_the_file(fragile: LiveGateway, fault: str) -> None:
    client = fragile.client()
    data = line("a", user="x" * 600_000)
    file = upload(client, data)
    path = fragile.files_dir / file.id[-2:] / file.id
    if fault == "flipped":
        path.write_bytes(data.replace(b"xxx", b"xyx", 1))
    else:
        os.truncate(path, len(data) - 1)
    code = "file_content_damaged" if fault == "flipped" else "file_content_missing"
    assert refused(lambda: create(client, file.id)) == (500, code, None)
    # It had begun to be sent: the client sees a broken transfer, not a short or wrong file.
    with pytest.raises(openai.APIConnectionError):
        client.files.content(file.id).read()
    assert list(client.batches.list()) == []


def test_a_small_damaged_object_is_refused_before_its_first_byte(fragile: LiveGateway) -> None:
    client = fragile.client()
    file = upload(client, line("a"))
    (fragile.files_dir / file.id[-2:] / file.id).write_bytes(line("b"))
    assert refused(lambda: client.files.content(file.id)) == (500, "file_content_damaged", None)


@pytest.mark.parametrize("step", ["before the object", "before the row"])
def test_a_crash_in_the_middle_is_swept(fragile: LiveGateway, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    client = fragile.client()

    async def die(*_: Any) -> Any:
        raise RuntimeError("the process dies here")

    async def nothing(*_: Any) -> None: ...

    files = fragile.store.files
    monkeypatch.setattr(local.LocalWriter, "abort", nothing)
    monkeypatch.setattr("frontend.batches.files.Files._withdraw", nothing)
    if step == "before the object":
        monkeypatch.setattr(local.LocalWriter, "commit", die)
    else:
        monkeypatch.setattr(type(files), "commit", die)
    assert refused(lambda: upload(client))[0] == 500
    monkeypatch.undo()
    assert list(client.files.list()) == []
    assert len(fragile.stored()) == 1
    assert fragile.run(fragile.service.sweeper.sweep()) == 0
    fragile.ahead_us += ABANDONED_SECONDS * 1_000_000 + 1
    for path in fragile.stored():
        os.utime(path, (0, 0))
    assert fragile.run(fragile.service.sweeper.sweep()) >= 1
    assert fragile.stored() == []
    assert fragile.run(fragile.service.sweeper.sweep()) == 0


def test_the_sweeper_goes_on_after_a_storage_that_was_away(
    fragile: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = fragile.client()
    gone = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    fragile.ahead_us += 3_601_000_000

    async def away(*_: Any) -> None:
        raise local.StorageUnavailable("away")

    monkeypatch.setattr(local.LocalObjects, "delete", away)
    with pytest.raises(local.StorageUnavailable):
        fragile.run(fragile.service.sweeper.sweep())
    monkeypatch.undo()
    assert (fragile.files_dir / gone.id[-2:] / gone.id).exists()
    assert fragile.run(fragile.service.sweeper.sweep()) == 1
    assert fragile.stored() == []
