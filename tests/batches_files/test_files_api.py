"""The Files API as the official SDK uses it, and as raw clients may abuse it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from live_gateway import LIMIT, QUOTA, LiveGateway

import openai
from frontend.batches.files import BATCH
from frontend.openai.principal import Role

LINE = b'{"custom_id":"a"}\n'
DAY = 86_400


def refusal(error: openai.APIStatusError) -> tuple[int, Any, Any]:
    body = error.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    if error.status_code != 503:
        assert error.response.headers["x-should-retry"] == "false"
    assert error.response.headers["x-request-id"]
    return error.status_code, body["code"], body["param"]


def refused(call: Any) -> tuple[int, Any, Any]:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return refusal(caught.value)


def upload(client: openai.OpenAI, data: bytes = LINE, name: str = "in.jsonl", **more: Any) -> Any:
    return client.files.create(file=(name, data), purpose=more.pop("purpose", BATCH), **more)


def form(parts: list[tuple[str, bytes, str | None]], boundary: bytes = b"xyz") -> bytes:
    out = b""
    for name, value, filename in parts:
        named = f'; filename="{filename}"' if filename is not None else ""
        out += b"--" + boundary + f'\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode()
        out += value + b"\r\n"
    return out + b"--" + boundary + b"--\r\n"


class Raw:
    """A connection that sends what it is told."""

    def __init__(self, gateway: LiveGateway, key: str) -> None:
        self._gateway = gateway
        self._key = key
        self.connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)

    def post(
        self, body: bytes | Iterator[bytes], *, headers: dict[str, str] | None = None, chunked: bool = False
    ) -> Any:
        sent = {
            "Authorization": f"Bearer {self._key}",
            "Content-Type": "multipart/form-data; boundary=xyz",
            **(headers or {}),
        }
        self.connection.request("POST", "/v1/files", body, sent, encode_chunked=chunked)
        return self.answer()

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Any:
        self.connection.request(method, path, headers={"Authorization": f"Bearer {self._key}", **(headers or {})})
        return self.answer()

    def answer(self) -> Any:
        response = self.connection.getresponse()
        body = response.read()
        response.json = lambda: json.loads(body)  # type: ignore[attr-defined]
        response.body = body  # type: ignore[attr-defined]
        return response


@pytest.fixture
def raw(gateway: LiveGateway) -> Iterator[Raw]:
    raw = Raw(gateway, gateway.key(gateway.new_workspace()))
    yield raw
    raw.connection.close()


def test_a_file_from_upload_to_delete(gateway: LiveGateway) -> None:
    client = gateway.client()
    before = set(gateway.stored())
    file = upload(client, LINE * 1000)
    assert file.id.startswith("file-") and len(file.id) == 37
    document = file.model_dump()
    assert document["expires_at"] - document["created_at"] == 7 * DAY
    assert {key: document[key] for key in ("object", "bytes", "filename", "purpose", "status", "status_details")} == {
        "object": "file", "bytes": len(LINE) * 1000, "filename": "in.jsonl", "purpose": BATCH, "status": "processed",
        "status_details": None,
    }  # fmt: skip
    assert client.files.retrieve(file.id) == file
    assert client.files.wait_for_processing(file.id) == file
    assert client.files.content(file.id).read() == LINE * 1000
    assert [one.id for one in client.files.list()] == [file.id]
    deleted = client.files.delete(file.id)
    assert deleted.model_dump() == {"id": file.id, "object": "file", "deleted": True}
    assert set(gateway.stored()) == before
    # Case ST-03: the repeat says that there is no such file.
    for call in (client.files.delete, client.files.retrieve, client.files.content):
        assert refused(lambda call=call: call(file.id)) == (404, "not_found", "id")


def test_fields_may_come_after_the_file(raw: Raw) -> None:
    body = form([("file", LINE, "x.jsonl"), ("expires_after[seconds]", b"3600", None), ("purpose", b"batch", None),
                 ("expires_after[anchor]", b"created_at", None)])  # fmt: skip
    answer = raw.post(body)
    assert answer.status == 200, answer.body
    document = answer.json()
    assert document["expires_at"] - document["created_at"] == 3600


def test_an_upload_without_content_length(raw: Raw) -> None:
    body = form([("purpose", b"batch", None), ("file", LINE * 10_000, "x.jsonl")])
    pieces = (body[start : start + 7001] for start in range(0, len(body), 7001))
    answer = raw.post(pieces, headers={"Transfer-Encoding": "chunked"}, chunked=True)
    assert answer.status == 200, answer.body
    assert answer.json()["bytes"] == len(LINE) * 10_000


@pytest.mark.parametrize("chunked", [False, True])
def test_case_bf_13_the_size_limit_is_exact(gateway: LiveGateway, raw: Raw, chunked: bool) -> None:
    before = set(gateway.stored())
    exact = b"{" + b" " * (LIMIT - 1)
    client = gateway.client()
    assert upload(client, exact).bytes == LIMIT
    assert refused(lambda: upload(client, exact + b" ")) == (413, "file_too_large", "file")
    sent = form([("purpose", b"batch", None), ("file", exact + b" ", "x")])
    options: dict[str, Any] = {"headers": {"Transfer-Encoding": "chunked"}, "chunked": True} if chunked else {}
    answer = raw.post(iter([sent]) if chunked else sent, **options)
    assert answer.status == 413
    assert f"max_file_bytes = {LIMIT} bytes" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert len(set(gateway.stored()) - before) == 1


def test_a_length_announced_too_large_is_refused_unread(raw: Raw) -> None:
    raw.connection.putrequest("POST", "/v1/files")
    for name, value in (
        ("Authorization", "Bearer x"), ("Content-Type", "multipart/form-data; boundary=xyz"),
        ("Content-Length", str(1 << 40)), ("Expect", "100-continue"),
    ):  # fmt: skip
        raw.connection.putheader(name, value)
    raw.connection.endheaders()
    answer = raw.answer()
    assert (answer.status, answer.json()["error"]["code"]) == (413, "file_too_large")


def test_case_bf_13_an_aborted_upload_leaves_nothing(gateway: LiveGateway) -> None:
    workspace = gateway.new_workspace()
    client = gateway.client(workspace)
    before = set(gateway.stored())
    body = form([("purpose", b"batch", None), ("file", LINE * 20_000, "x.jsonl")])
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
        f"Content-Type: multipart/form-data; boundary=xyz\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as torn:
        torn.sendall(head + body[: len(body) // 2])
        # Something has arrived on the disk: the upload is in its middle.
        assert _eventually(lambda: any(path.stat().st_size for path in set(gateway.stored()) - before))
    assert _eventually(lambda: set(gateway.stored()) == before)
    assert list(client.files.list()) == []
    assert gateway.run(gateway.store.files.to_sweep(10, 0)) == ()


def _eventually(condition: Any) -> bool:
    import time

    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            if condition():
                return True
        except FileNotFoundError:
            pass
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_file"),
        (b"\n \r\n\t", "invalid_file"),
        (b"\xef\xbb\xbf", "invalid_file"),
        (b"[1]\n", "invalid_file"),
        (b"\xef\xbb\xbf x{", "invalid_file"),
        (b"\x00{}", "invalid_file"),
        (b'{"a":"' + b"x" * 300_000 + b'\x00"}', "invalid_file"),
    ],
)
def test_what_cannot_be_a_batch_file(gateway: LiveGateway, raw: Raw, data: bytes, code: str) -> None:
    before = set(gateway.stored())
    assert refused(lambda: upload(gateway.client(), data)) == (400, code, "file")
    # The same if the purpose comes last.
    answer = raw.post(form([("file", data, "x"), ("purpose", b"batch", None)]))
    assert (answer.status, answer.json()["error"]["code"]) == (400, code)
    assert set(gateway.stored()) == before


@pytest.mark.parametrize("data", [b"{", b"\n\r\n {", b"\xef\xbb\xbf\n{"])
def test_what_may_stand_before_the_first_line(gateway: LiveGateway, data: bytes) -> None:
    assert upload(gateway.client(), data).bytes == len(data)


def test_other_files_may_hold_anything_but_nothing(gateway: LiveGateway) -> None:
    client = gateway.client()
    file = upload(client, b"\x00\xffanything", purpose="user_data")
    assert file.model_dump()["expires_at"] is None
    assert client.files.content(file.id).read() == b"\x00\xffanything"
    assert refused(lambda: upload(client, b"", purpose="user_data")) == (400, "invalid_file", "file")


@pytest.mark.parametrize(
    ("purpose", "code"),
    [
        ("fine-tune", "unsupported_capability"),
        ("assistants", "unsupported_capability"),
        ("batch_output", "invalid_value"),
        ("nonsense", "invalid_value"),
        ("", "invalid_value"),
    ],
)
def test_purposes_that_are_refused(gateway: LiveGateway, purpose: str, code: str) -> None:
    assert refused(lambda: upload(gateway.client(), purpose=purpose)) == (400, code, "purpose")


@pytest.mark.parametrize("seconds", [0, -1, 3599, 2_592_001, "abc", "", "3600.5", "٣٦٠٠"])
def test_case_bf_15_expiry_out_of_range(gateway: LiveGateway, seconds: Any) -> None:
    client = gateway.client()
    expiry = {"anchor": "created_at", "seconds": seconds}
    assert refused(lambda: upload(client, expires_after=expiry)) == (400, "invalid_value", "expires_after[seconds]")
    assert list(client.files.list()) == []


@pytest.mark.parametrize("expiry", [{"seconds": 3600}, {"anchor": "last_active_at", "seconds": 3600}])
def test_case_bf_15_expiry_needs_its_anchor(gateway: LiveGateway, expiry: Any) -> None:
    refused_as = refused(lambda: upload(gateway.client(), expires_after=expiry))
    assert refused_as == (400, "invalid_value", "expires_after[anchor]")


@pytest.mark.parametrize(
    ("purpose", "seconds", "kept"),
    [(BATCH, 3600, 3600), (BATCH, 2_592_000, 7 * DAY), ("user_data", 2_592_000, 2_592_000)],
)
def test_the_sooner_of_retention_and_expiry(gateway: LiveGateway, purpose: str, seconds: int, kept: int) -> None:
    file = upload(gateway.client(), purpose=purpose, expires_after={"anchor": "created_at", "seconds": seconds})
    document = file.model_dump()
    assert document["expires_at"] - document["created_at"] == kept


def test_the_quota_is_exact_and_freed_by_delete(gateway: LiveGateway) -> None:
    client = gateway.client()
    first = [upload(client, b"{" + b" " * (LIMIT - 1)) for _ in range(QUOTA // LIMIT)]
    assert refused(lambda: upload(client, b"{")) == (413, "storage_quota_exceeded", "file")
    client.files.delete(first[0].id)
    assert upload(client, b"{").bytes == 1
    # Another workspace has its own.
    assert upload(gateway.client(), b"{").bytes == 1


def test_lists_page_by_the_last_id_seen(gateway: LiveGateway) -> None:
    client = gateway.client()
    ids = [upload(client, name=f"{number}.jsonl").id for number in range(5)]
    other = upload(client, purpose="user_data").id
    assert [one.id for one in client.files.list(limit=2)] == [other, *reversed(ids)]
    assert [one.id for one in client.files.list(limit=2, order="asc")] == [*ids, other]
    assert [one.id for one in client.files.list(purpose="user_data")] == [other]
    page = client.files.list(limit=2, order="asc", after=ids[1])
    assert ([one.id for one in page.data], page.has_more) == (ids[2:4], True)
    client.files.delete(ids[1])
    assert client.files.list(limit=1, order="asc", after=ids[1]).data[0].id == ids[2]
    for bad in (0, -1, 10_001, "x"):
        assert refused(lambda bad=bad: client.files.list(limit=bad)) == (400, "invalid_value", "limit")
    assert refused(lambda: client.files.list(order="up")) == (400, "invalid_value", "order")  # type: ignore[arg-type]
    assert refused(lambda: client.files.list(purpose="nope")) == (400, "invalid_value", "purpose")
    for after in ("file-" + "0" * 32, "../x"):
        assert refused(lambda after=after: client.files.list(after=after)) == (404, "not_found", "after")


def test_another_workspaces_file_does_not_exist(gateway: LiveGateway) -> None:
    owner, stranger = gateway.client(), gateway.client()
    file = upload(owner)
    for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        assert refused(lambda call=call: call(file.id)) == (404, "not_found", "id")
    assert list(stranger.files.list()) == []
    assert owner.files.content(file.id).read() == LINE


def test_an_expired_file_is_gone_at_once_and_swept_later(gateway: LiveGateway) -> None:
    client = gateway.client()
    file = upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    path = gateway.files_dir / file.id[-2:] / file.id
    gateway.ahead_us += 3_601_000_000
    assert refused(lambda: client.files.retrieve(file.id)) == (404, "not_found", "id")
    assert refused(lambda: client.files.content(file.id)) == (404, "not_found", "id")
    assert list(client.files.list()) == []
    assert path.exists()
    assert gateway.run(gateway.service.sweeper.sweep()) >= 1
    assert not path.exists()


def test_ids_are_opaque_and_checked(raw: Raw) -> None:
    for path in (
        "/v1/files/..%2f..%2fstore.sqlite3/content", "/v1/files/../content", "/v1/files/file-xyz", "/v1/files/%00",
        "/v1/files/file-" + "0" * 32, "/v1/files/FILE-" + "0" * 32, "/v1/files/" + "f" * 5000,
    ):  # fmt: skip
        answer = raw.get(path)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found"), path


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("../../x.jsonl", "x.jsonl"),
        ("C:\\temp\\x.jsonl", "x.jsonl"),
        ("a\r\nSet-Cookie: b", "aSet-Cookie: b"),
        ("gpj.\u202exe", "gpj.xe"),
        ("na\u0000me\u0007.txt", "name.txt"),
        ("..", "file"),
        ("dir/", "file"),
        ("ünï 漢字.jsonl", "ünï 漢字.jsonl"),
        ("n" * 4096 + ".jsonl", "n" * 249 + ".jsonl"),
        ("é" * 300, "é" * 127),
    ],
)
def test_case_st_06_a_filename_is_a_label(gateway: LiveGateway, given: str, kept: str) -> None:
    from frontend.batches.filenames import attachment, clean_filename

    assert clean_filename(given) == kept
    assert len(attachment(kept).splitlines()) == 1
    if "\x00" in given or len(given) > 1000:
        return  # SDKs cannot send these
    client = gateway.client()
    file = upload(client, name=given)
    assert "/" not in file.filename
    assert "\r" not in client.files.content(file.id).response.headers["content-disposition"]


def test_content_is_an_attachment_and_nothing_to_sniff(gateway: LiveGateway) -> None:
    client = gateway.client()
    file = upload(client, name='na"me ü.html')
    headers = client.files.content(file.id).response.headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"].startswith("attachment; filename=")
    assert headers["x-request-id"]


@pytest.mark.parametrize(
    ("asked", "status", "span"),
    [
        ("bytes=0-3", 206, (0, 4)),
        ("bytes=5-", 206, (5, 18)),
        ("bytes=-4", 206, (14, 18)),
        ("bytes=-99", 200, (0, 18)),
        ("bytes=3-999", 206, (3, 18)),
        ("bytes=0-17", 200, (0, 18)),
        ("bytes=4-2", 200, (0, 18)),
        ("bytes=0-1,4-5", 200, (0, 18)),
        ("lines=0-1", 200, (0, 18)),
        ("bytes=18-", 416, None),
        ("bytes=-0", 416, None),
    ],
)
def test_single_ranges(raw: Raw, asked: str, status: int, span: tuple[int, int] | None) -> None:
    file_id = raw.post(form([("purpose", b"batch", None), ("file", LINE, "x")])).json()["id"]
    answer = raw.get(f"/v1/files/{file_id}/content", {"Range": asked})
    assert answer.status == status
    if span is None:
        assert answer.headers["content-range"] == f"bytes */{len(LINE)}"
        return
    assert answer.body == LINE[slice(*span)]
    if status == 206:
        assert answer.headers["content-range"] == f"bytes {span[0]}-{span[1] - 1}/{len(LINE)}"
    head = raw.get(f"/v1/files/{file_id}/content", {"Range": asked}, method="HEAD")
    assert (head.status, head.body) == (status, b"")


def test_methods_and_paths_that_are_not_offered(raw: Raw) -> None:
    for method, path, allowed in (
        ("PUT", "/v1/files", "GET, HEAD, POST"), ("POST", "/v1/files/file-x", "GET, HEAD, DELETE"),
        ("DELETE", "/v1/batches/batch_x", "GET, HEAD"), ("GET", "/v1/batches/batch_x/cancel", "POST"),
    ):  # fmt: skip
        answer = raw.get(path, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, allowed)
    for path in ("/v1/files/a/b", "/v1/files//content/x", "/v1/batches/a/b/c"):
        assert raw.get(path).json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("body", "content_type", "code"),
    [
        (b"{}", "application/json", "invalid_content_type"),
        (form([]), "multipart/form-data", "invalid_multipart"),
        (form([]), "multipart/form-data; boundary=" + "b" * 71, "invalid_multipart"),
        (b"junk", "multipart/form-data; boundary=xyz", "invalid_multipart"),
        (form([("purpose", b"batch", None)]), "multipart/form-data; boundary=xyz", "missing_required_parameter"),
        (form([("file", LINE, "x")]), "multipart/form-data; boundary=xyz", "missing_required_parameter"),
        (form([("file", LINE, None)]), "multipart/form-data; boundary=xyz", "invalid_value"),
        (form([("other", LINE, "x")]), "multipart/form-data; boundary=xyz", "invalid_value"),
        (form([("surprise", b"1", None)]), "multipart/form-data; boundary=xyz", "unknown_parameter"),
        (form([("purpose", b"x" * 1025, None)]), "multipart/form-data; boundary=xyz", "invalid_value"),
        (form([("purpose", b"batch", None)] * 2), "multipart/form-data; boundary=xyz", "invalid_value"),
        (form([("file", LINE, "x"), ("purpose", b"batch", None)])[:-6], "multipart/form-data; boundary=xyz",
         "invalid_multipart"),
    ],
)  # fmt: skip
def test_forms_that_are_not_in_order(gateway: LiveGateway, raw: Raw, body: bytes, content_type: str, code: str) -> None:
    before = set(gateway.stored())
    answer = raw.post(body, headers={"Content-Type": content_type})
    assert (answer.status, answer.json()["error"]["code"]) == (400, code), answer.body
    assert set(gateway.stored()) == before


def test_strangers_and_auditors(gateway: LiveGateway) -> None:
    workspace = gateway.new_workspace()
    auditor = gateway.client(workspace, Role.AUDITOR)
    file = upload(gateway.client(workspace))
    assert auditor.files.retrieve(file.id) == file
    for call in (
        lambda: upload(auditor),
        lambda: auditor.files.delete(file.id),
        lambda: auditor.files.content(file.id),
    ):
        assert refused(call)[0] == 403
    before = set(gateway.stored())
    nobody = gateway.client().with_options(api_key="sk-ring-" + "x" * 43)
    assert refused(lambda: upload(nobody, LINE * 50_000))[0] == 401
    assert refused(lambda: nobody.files.list())[0] == 401
    assert set(gateway.stored()) == before
