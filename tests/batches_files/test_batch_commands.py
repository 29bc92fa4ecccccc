"""``ringserve batch`` against a running gateway: every action, with and without a terminal."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_gateway import LIMIT, LiveGateway
from test_batches_api import line

from frontend.batches.files import new_file_id
from frontend.batches.objects import object_path
from frontend.batches.store.rows import NewFile, WrittenFile
from frontend.cli import build_parser
from frontend.commands import batch
from frontend.commands.progress import Progress

Run = Callable[..., int]


@pytest.fixture
def run(gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RINGSERVE_API_KEY", gateway.key(gateway.new_workspace()))
    monkeypatch.setenv("RINGSERVE_BASE_URL", gateway.base_url)

    def call(*words: str, sleep: Callable[[float], None] = lambda _: None) -> int:
        return batch.run(build_parser().parse_args(["batch", *words]), sleep)

    return call


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / 'my "requests".jsonl'
    path.write_bytes(b"\xef\xbb\xbf\n" + line("a") + line("b"))
    return path


def end(gateway: LiveGateway, batch_id: str, output: bytes = b"", error: bytes = b"") -> None:
    """End a batch as a runner would whose lines all ran."""

    async def write(workspace_id: str, data: bytes) -> WrittenFile:
        file_id = new_file_id()
        new = NewFile(
            file_id, workspace_id, "batch_output", "batch_output", "out", "application/jsonl", object_path(file_id)
        )
        await gateway.store.files.insert(new)
        writer = await gateway.service.objects.open_writer(object_path(file_id))
        await writer.write(data)
        written = await writer.commit()
        return WrittenFile(file_id, written.bytes, written.sha256)

    async def finish() -> None:
        runner = gateway.store.runner
        await runner.acquire("runner", 60_000_000)
        await runner.take("runner", 60_000_000, 1000)
        row = await gateway.store.batches.get(None, batch_id)
        assert row is not None
        files = [await write(row.workspace_id, data) if data else None for data in (output, error)]
        await runner.finalize("runner", batch_id, "completed", output=files[0], error=files[1])

    gateway.run(finish())


def submitted(run: Run, requests: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert run("submit", str(requests), *more) == 0
    out = capsys.readouterr().out.strip()
    assert out.startswith("batch_")
    return out


def test_submit_show_list_cancel(run: Run, requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch_id = submitted(
        run, requests, capsys, "--metadata", "who=me", "--metadata", "batch_retries=1", "--window", "48h"
    )
    assert run("show", batch_id) == 0
    shown = capsys.readouterr().out
    assert f"{batch_id}: validating" in shown
    assert "0 completed, 0 failed, 2 in all" in shown
    assert "window 48h" in shown
    assert "metadata who=me" in shown
    assert run("list") == 0
    title, row = capsys.readouterr().out.splitlines()
    assert title.split()[:3] == ["BATCH", "STATUS", "DONE"]
    assert row.split()[:5] == [batch_id, "validating", "0", "0", "2"]
    assert run("list", "--json") == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == [batch_id]
    assert run("cancel", batch_id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "cancelling"


def test_the_same_idempotency_key_makes_one_batch(run: Run, requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = submitted(run, requests, capsys, "--idempotency-key", "k")
    # Another upload is another input, so another request.
    assert run("submit", str(requests), "--idempotency-key", "k") == 1
    assert "Idempotency-Key was used" in capsys.readouterr().err
    assert run("list", "--json") == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == [first]


def test_wait_and_results(
    gateway: LiveGateway, run: Run, requests: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output, error = b'{"custom_id":"a"}\n' * 40_000, b'{"custom_id":"b"}\n'
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 2:
            end(gateway, capsys.readouterr().err.splitlines()[-2], output, error)

    assert run("submit", str(requests), "--wait", "--json", sleep=sleep) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["status"] == "completed"
    assert "completed, lines" in shown.err
    assert polls == [batch.POLL_S] * 2
    target = tmp_path / "out.jsonl"
    assert run("results", document["id"], "-o", str(target)) == 0
    assert target.read_bytes() == output
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([requests.name, "out.jsonl"])
    assert run("results", document["id"], "--errors", "-o", str(target)) == 0
    assert target.read_bytes() == error


def test_a_reader_who_has_seen_enough_is_no_failure_to_talk_about(
    gateway: LiveGateway, run: Run, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch_id = submitted(run, requests, capsys)
    end(gateway, batch_id, b'{"custom_id":"a"}\n' * 100_000)
    command = f"{shlex.quote(sys.executable)} -m frontend.cli batch results {batch_id} | head -n 1"
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout == '{"custom_id":"a"}\n'
    assert shown.stderr == ""


def test_results_before_the_end(run: Run, requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch_id = submitted(run, requests, capsys)
    assert run("results", batch_id) == 1
    assert "it is written when the batch ends" in capsys.readouterr().err


def test_a_report_names_the_lines(run: Run, requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests.write_bytes(line("a") + b"{bad\n" + line("a"))
    assert run("submit", str(requests)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [text.split()[:3] for text in lines[-2:]] == [
        ["line", "2:", "invalid_json:"],
        ["line", "3:", "duplicate_custom_id:"],
    ]


def test_a_refusal_in_the_middle_of_an_upload_is_told(
    run: Run, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.write_bytes(line("a") + b" " * (40 * LIMIT))
    assert run("submit", str(requests)) == 1
    assert f"max_file_bytes = {LIMIT} bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("submit", "/nowhere/x.jsonl"), 2, "No such file"),
        (("submit", "FILE", "--metadata", "no-value"), 2, "expected KEY=VALUE"),
        (("show", "batch_" + "0" * 32), 1, "HTTP 404: no such batch"),
        (("show", "../files"), 1, "is no batch id"),
        (("list", "--url", "nonsense"), 1, "expected something like"),
    ],
)
def test_mistakes_are_told(
    run: Run, requests: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, text: str
) -> None:
    assert run(*(str(requests) if word == "FILE" else word for word in words)) == status
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{bad\n", b"[1]\n", b'{"url":1}\n'])
def test_without_a_url_in_its_first_line_an_endpoint_is_asked_for(
    run: Run, requests: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    requests.write_bytes(content)
    assert run("submit", str(requests)) == 2
    assert "say --endpoint" in capsys.readouterr().err


def test_a_wrong_key_and_no_key(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    secret = "sk-ring-" + "x" * 43
    monkeypatch.setenv("RINGSERVE_API_KEY", secret)
    assert run("list") == 1
    shown = capsys.readouterr().err
    assert "HTTP 401" in shown and secret not in shown
    monkeypatch.delenv("RINGSERVE_API_KEY")
    assert run("list", "--run-dir", str(tmp_path)) == 1
    assert "set RINGSERVE_API_KEY" in capsys.readouterr().err


def test_the_development_key_of_a_node_is_found(
    gateway: LiveGateway, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("RINGSERVE_API_KEY")
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "development.key").write_text(gateway.key(gateway.new_workspace()) + "\n")
    assert run("list", "--run-dir", str(tmp_path), "--json") == 0
    assert capsys.readouterr().out == "[]\n"


def test_a_gateway_that_is_away_is_asked_again(
    gateway: LiveGateway, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from frontend.commands.gateway_client import CallFailed, GatewayClient

    key = gateway.key(gateway.new_workspace())
    now = [0.0]
    gone = GatewayClient(
        "http://127.0.0.1:1/v1", key, clock_s=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    )
    with pytest.raises(CallFailed, match="no answer from"):
        gone.get("/batches")
    assert 100 < now[0] <= 120

    def back(_: float) -> None:
        gone._parts = gone._parts._replace(netloc=f"127.0.0.1:{gateway.port}")

    gone._sleep = back
    assert gone.get("/batches")["data"] == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_redraws_itself() -> None:
    stream, now = Terminal(), [0.0]
    progress = Progress(stream, clock_s=lambda: now[0])
    for done in range(5):
        progress.show("lines", done, 4)
        now[0] += 0.06
    progress.end()
    progress.end()
    drawn = stream.getvalue()
    assert drawn.startswith("\r[........................] lines 0/4 (0%)")
    assert drawn.endswith("\r[########################] lines 4/4 (100%)\n")
    assert drawn.count("\r") == 3  # 0, 2, 4: not more often than the eye can follow


def test_elsewhere_there_are_plain_lines_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, clock_s=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        progress.show("in_progress, lines", second, 100, "1 failed" if second else "")
    progress.show("completed, lines", 100, 100)
    progress.end()
    assert stream.getvalue().splitlines() == [
        "in_progress, lines 0/100 (0%)",
        "in_progress, lines 10/100 (10%), 1 failed",
        "in_progress, lines 20/100 (20%), 1 failed",
        "completed, lines 100/100 (100%)",
    ]


def test_progress_goes_to_the_error_stream_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    Progress().show("uploading", 0, 0)
    assert stream.getvalue() == "uploading\n"
