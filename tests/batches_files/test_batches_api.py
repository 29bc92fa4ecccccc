"""The Batches API as the official SDK uses it: creating, refusing, showing, listing, cancelling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_gateway import LiveGateway, live_gateway
from test_files_api import refusal, refused

import openai
from frontend.batches.batch_requests import report_document
from frontend.batches.validation import LineFault
from frontend.batches.work_file import open_work_file
from frontend.openai.calls import CHAT, EMBEDDINGS
from frontend.openai.principal import Role

ENDPOINT: Any = CHAT
HOUR = 3600


def line(custom_id: str, model: str = "m", **body: Any) -> bytes:
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}).encode() + b"\n"


def put(client: openai.OpenAI, data: bytes, purpose: Any = "batch") -> str:
    return client.files.create(file=("in.jsonl", data), purpose=purpose).id


def create(client: openai.OpenAI, input_id: str, **changed: Any) -> Any:
    asked = {"endpoint": ENDPOINT, "completion_window": "24h", "input_file_id": input_id, **changed}
    return client.batches.create(**asked)


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_a_batch_from_create_to_cancel(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = "" if store == "sqlite" else request.getfixturevalue("postgres_url")
    with live_gateway(tmp_path, store=url) as gateway:
        client = gateway.client()
        input_id = put(client, b"\xef\xbb\xbf" + line("a") + b"\r\n" + line("b", "n").strip() + b"\r\n \n" + line("c"))
        metadata = {"purpose": "nightly", "batch_retries": "1"}
        batch = create(client, input_id, metadata=metadata, completion_window="72h")
        document = batch.model_dump()
        assert document["expires_at"] - document["created_at"] == 72 * HOUR
        expected = {
            "object": "batch", "endpoint": CHAT, "model": "mixed", "errors": None, "input_file_id": input_id,
            "completion_window": "72h", "status": "validating", "output_file_id": None, "error_file_id": None,
            "in_progress_at": None, "finalizing_at": None, "completed_at": None, "failed_at": None, "expired_at": None,
            "cancelling_at": None, "cancelled_at": None, "metadata": metadata,
            "request_counts": {"total": 3, "completed": 0, "failed": 0},
        }  # fmt: skip
        assert {key: document[key] for key in expected} == expected
        assert client.batches.retrieve(batch.id) == batch
        assert [one.id for one in client.batches.list()] == [batch.id]
        # The client may delete its input: the batch has its own copy.
        client.files.delete(input_id)
        row = gateway.run(gateway.store.batches.get(None, batch.id))
        assert row is not None and row.work_file_id is not None and row.retry_limit == 1
        file = gateway.run(gateway.store.files.get_internal(row.work_file_id))
        assert file is not None and file.storage_path is not None

        async def read() -> Any:
            work = await open_work_file(gateway.service.objects, file.storage_path, file.bytes)
            return [lane.model for lane in work.index.lanes()], await work.read_lines(range(len(work.index)))

        models, lines = gateway.run(read())
        assert models == ["m", "n"]
        assert lines == [line("a").strip(), line("b", "n").strip(), line("c").strip()]
        assert list(client.files.list()) == []
        assert refused(lambda: client.files.content(row.work_file_id)) == (404, "not_found", "id")
        stopped = client.batches.cancel(batch.id)
        assert stopped.status == "cancelling"
        assert stopped.model_dump()["cancelling_at"] is not None
        # Case BF-03: repeating it is harmless.
        assert client.batches.cancel(batch.id) == stopped


def test_acceptance_22_an_ended_batch_is_not_cancellable(gateway: LiveGateway) -> None:
    client = gateway.client()
    batch = create(client, put(client, line("a")))
    client.batches.cancel(batch.id)

    async def end() -> None:
        await gateway.store.runner.acquire("runner", 60_000_000)
        taken = await gateway.store.runner.take("runner", 60_000_000, 100)
        assert batch.id in {one.batch.id for one in taken}
        await gateway.store.runner.finalize("runner", batch.id, "cancelled")

    gateway.run(end())
    ended = client.batches.retrieve(batch.id).model_dump()
    assert ended["status"] == "cancelled"
    assert [name for name in ("completed_at", "failed_at", "expired_at", "cancelled_at") if ended[name]] == [
        "cancelled_at"
    ]
    assert refused(lambda: client.batches.cancel(batch.id)) == (409, "batch_not_cancellable", None)
    assert client.batches.retrieve(batch.id).model_dump() == ended


def test_acceptance_24_a_bad_file_creates_nothing(gateway: LiveGateway) -> None:
    workspace = gateway.new_workspace()
    client = gateway.client(workspace)
    data = line("a") + b"{not json s3cr3t\n" + line("a") + b"\n" + line("b", "unknown") + line("c", stream=True)
    input_id = put(client, data)
    before = set(gateway.stored())
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, input_id)
    assert refusal(caught.value) == (400, "invalid_batch_input", "input_file_id")
    report = caught.value.response.json()["errors"]
    assert report["object"] == "list"
    assert [(entry["line"], entry["code"], entry["param"]) for entry in report["data"]] == [
        (2, "invalid_json", None), (3, "duplicate_custom_id", None), (5, "model_not_found", None),
        (6, "invalid_body", None),
    ]  # fmt: skip
    assert b"s3cr3t" not in caught.value.response.content
    assert list(client.batches.list()) == []
    assert set(gateway.stored()) == before
    assert gateway.run(gateway.store.files.to_sweep(10, 0)) == ()


def test_models_of_other_endpoints_are_told_apart(gateway: LiveGateway) -> None:
    client = gateway.client()
    infer = {"custom_id": "a", "method": "POST", "url": "/v2/models/m/infer", "body": {"inputs": [{}]}}
    input_id = put(client, json.dumps(infer).encode())
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, input_id, endpoint="/v2/models/m/infer")
    assert [entry["code"] for entry in caught.value.response.json()["errors"]["data"]] == ["model_unsupported"]


def test_the_limit_of_lines_is_exact(gateway: LiveGateway) -> None:
    client = gateway.client()
    good = b"".join(line(str(number)) for number in range(500))
    assert create(client, put(client, good)).model_dump()["request_counts"]["total"] == 500
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, put(client, good + line("one more")))
    assert [(e["line"], e["code"]) for e in caught.value.response.json()["errors"]["data"]] == [(501, "too_many_lines")]


def test_case_bf_05_inputs_that_are_none(gateway: LiveGateway) -> None:
    client, stranger = gateway.client(), gateway.client()
    other_purpose = put(client, line("a"), "user_data")
    assert refused(lambda: create(client, other_purpose)) == (400, "invalid_input_file", "input_file_id")
    deleted = put(client, line("a"))
    client.files.delete(deleted)
    for input_id in (put(stranger, line("a")), deleted, "file-" + "0" * 32, "file-abc", "../../x", ""):
        assert refused(lambda input_id=input_id: create(client, input_id)) == (404, "not_found", "input_file_id")


@pytest.mark.parametrize(
    ("changed", "code", "param"),
    [
        ({"completion_window": "36h"}, "invalid_value", "completion_window"),
        ({"completion_window": None}, "missing_required_parameter", "completion_window"),
        ({"completion_window": 24}, "invalid_type", "completion_window"),
        ({"endpoint": "/v1/nope"}, "invalid_value", "endpoint"),
        ({"endpoint": "/v1/messages"}, "unsupported_capability", "endpoint"),
        ({"endpoint": None}, "missing_required_parameter", "endpoint"),
        ({"input_file_id": 3}, "invalid_type", "input_file_id"),
        ({"extra_body": {"surprise": 1}}, "unknown_parameter", "surprise"),
        ({"metadata": {str(number): "" for number in range(17)}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k" * 65: ""}}, "invalid_metadata", "metadata"),
        ({"metadata": {"": ""}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": "v" * 513}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": "é" * 257}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": {"nested": "x"}}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": 1}}, "invalid_metadata", "metadata"),
        ({"metadata": []}, "invalid_metadata", "metadata"),
        ({"metadata": {"batch_retries": "3"}}, "invalid_metadata", "metadata"),
        ({"metadata": {"omg_retries": "x"}}, "invalid_metadata", "metadata"),
        ({"metadata": {"batch_retries": "1", "omg_retries": "2"}}, "invalid_metadata", "metadata"),
        ({"metadata": {"batch_mode": "fast"}}, "invalid_metadata", "metadata"),
        ({"metadata": {"omg_mode": "native"}}, "unsupported_capability", "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "invalid_value", "output_expires_after"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "invalid_value", "output_expires_after.anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "invalid_value",
         "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "invalid_value",
         "output_expires_after.seconds"),
    ],
)  # fmt: skip
def test_requests_that_are_not_in_order(gateway: LiveGateway, changed: dict[str, Any], code: str, param: str) -> None:
    assert refused(lambda: create(gateway.client(), "file-" + "0" * 32, **changed)) == (400, code, param)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 5000])
def test_bodies_that_are_no_object(gateway: LiveGateway, body: bytes) -> None:
    client = gateway.client()
    response = client._client.post(
        f"{gateway.base_url}/batches", content=body, headers={"Authorization": f"Bearer {client.api_key}"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("metadata", "retries"),
    [
        ({"batch_retries": "2"}, 2),
        ({"omg_retries": "1", "omg_mode": "auto"}, 1),
        ({"x_retries": "0", "batch_mode": "gateway"}, 0),
        ({str(number): "v" * 512 for number in range(16)}, 0),
        ({"k" * 64: ""}, 0),
        ({}, 0),
        (None, 0),
    ],
)
def test_metadata_is_kept_and_heeded(gateway: LiveGateway, metadata: dict[str, str] | None, retries: int) -> None:
    client = gateway.client()
    batch = create(client, put(client, line("a")), metadata=metadata)
    assert client.batches.retrieve(batch.id).metadata == metadata
    row = gateway.run(gateway.store.batches.get(None, batch.id))
    assert row is not None and row.retry_limit == retries


def test_acceptance_23_windows_and_output_expiry(gateway: LiveGateway) -> None:
    client = gateway.client()
    input_id = put(client, line("a"))
    for hours in (24, 48, 72, 168):
        expiry: Any = {"anchor": "created_at", "seconds": 2_592_000}
        batch = create(client, input_id, completion_window=f"{hours}h", output_expires_after=expiry).model_dump()
        assert batch["completion_window"] == f"{hours}h"
        assert batch["expires_at"] - batch["created_at"] == hours * HOUR


def test_an_idempotency_key_makes_one_batch(gateway: LiveGateway) -> None:
    client = gateway.client()
    input_id = put(client, line("a"))
    key = {"Idempotency-Key": "once"}
    first = create(client, input_id, extra_headers=key)
    before = set(gateway.stored())
    # Also once the input is gone: nothing is read again.
    client.files.delete(input_id)
    assert create(client, input_id, extra_headers=key).id == first.id
    conflict = lambda: create(client, input_id, completion_window="48h", extra_headers=key)  # noqa: E731
    assert refused(conflict) == (409, "idempotency_conflict", "Idempotency-Key")
    assert len(before - set(gateway.stored())) == 1
    assert [one.id for one in client.batches.list()] == [first.id]
    # Another workspace's key is another key.
    other = gateway.client()
    assert create(other, put(other, line("a")), extra_headers=key).id != first.id
    too_long = {"Idempotency-Key": "k" * 256}
    assert refused(lambda: create(client, input_id, extra_headers=too_long))[:2] == (400, "invalid_value")


def test_case_bf_16_job_slots(gateway: LiveGateway) -> None:
    client = gateway.client()
    input_id = put(client, line("a"))
    batches = [create(client, input_id) for _ in range(50)]
    with pytest.raises(openai.RateLimitError) as caught:
        create(client, input_id)
    assert refusal(caught.value) == (429, "job_limit_exceeded", None)
    assert int(caught.value.response.headers["retry-after"]) > 0
    # Rule 53: a cancel frees the slot at once.
    client.batches.cancel(batches[0].id)
    create(client, input_id)


def test_another_workspaces_batch_does_not_exist(gateway: LiveGateway) -> None:
    owner, stranger = gateway.client(), gateway.client()
    batch = create(owner, put(owner, line("a")))
    for call in (stranger.batches.retrieve, stranger.batches.cancel):
        for batch_id in (batch.id, "batch_" + "0" * 32, "batch_x", "..%2fx"):
            assert refused(lambda call=call, batch_id=batch_id: call(batch_id)) == (404, "not_found", "id")
    assert list(stranger.batches.list()) == []
    assert owner.batches.retrieve(batch.id).status == "validating"


def test_lists_page_newest_first(gateway: LiveGateway) -> None:
    client = gateway.client()
    input_id = put(client, line("a"))
    ids = [create(client, input_id).id for _ in range(5)]
    assert [one.id for one in client.batches.list(limit=2)] == ids[::-1]
    page = client.batches.list(limit=2, after=ids[3])
    assert ([one.id for one in page.data], page.has_more) == ([ids[2], ids[1]], True)
    for bad in (0, 101):
        assert refused(lambda bad=bad: client.batches.list(limit=bad)) == (400, "invalid_value", "limit")
    for after in ("batch_" + "0" * 32, "x"):
        assert refused(lambda after=after: client.batches.list(after=after)) == (404, "not_found", "after")


def test_auditors_look_and_change_nothing(gateway: LiveGateway) -> None:
    workspace = gateway.new_workspace()
    client, auditor = gateway.client(workspace), gateway.client(workspace, Role.AUDITOR)
    input_id = put(client, line("a"))
    batch = create(client, input_id)
    assert auditor.batches.retrieve(batch.id) == batch
    assert refused(lambda: create(auditor, input_id))[0] == 403
    assert refused(lambda: auditor.batches.cancel(batch.id))[0] == 403


@pytest.fixture(scope="module")
def deferring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    with live_gateway(tmp_path_factory.mktemp("deferring"), batches={"validation": "async"}) as running:
        yield running


def test_deferred_validation_accepts_first_and_fails_later(deferring: LiveGateway) -> None:
    client = deferring.client()
    input_id = put(client, b"{bad\n")
    batch = create(client, input_id)
    assert batch.status == "validating"
    # The input is still needed.
    assert refused(lambda: client.files.delete(input_id)) == (409, "file_in_use", None)
    faults = (LineFault("invalid_json", "The line is not valid JSON.", 1),)

    async def fail() -> None:
        await deferring.store.runner.acquire("runner", 60_000_000)
        await deferring.store.runner.take("runner", 60_000_000, 100)
        errors = json.dumps(report_document(faults))
        await deferring.store.runner.finalize(
            "runner", batch.id, "failed", error_code="invalid_batch_input", errors=errors
        )

    deferring.run(fail())
    failed = client.batches.retrieve(batch.id)
    assert failed.status == "failed" and failed.failed_at is not None
    assert failed.errors is not None and failed.errors.data is not None
    assert [(entry.line, entry.code) for entry in failed.errors.data] == [(1, "invalid_json")]
    client.files.delete(input_id)


def test_batches_that_are_switched_off(tmp_path: Path) -> None:
    with live_gateway(tmp_path, batches={"enabled": False}) as gateway:
        client = gateway.client()
        input_id = put(client, line("a"))
        assert refused(lambda: create(client, input_id)) == (400, "batch_files_disabled", None)


def test_embeddings_take_what_the_sdk_sends(gateway: LiveGateway) -> None:
    client = gateway.client()
    asked = {"custom_id": "a", "method": "POST", "url": EMBEDDINGS, "body": {"model": "m", "input": ["x"]}}
    batch = create(client, put(client, json.dumps(asked).encode()), endpoint=EMBEDDINGS)
    assert batch.model_dump()["model"] == "m"
