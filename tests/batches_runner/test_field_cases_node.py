"""Faults that people met elsewhere, tried on a whole node by the official SDK, its commands and its management API."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_batches_node import NODE_FILE, Surroundings, chat

import openai
from frontend.cli import main
from real_node import Node, until
from stub_upstream import Say, StubUpstream, completion

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Holder:
    """Somebody with a key."""

    key: str
    workspace_id: str
    client: openai.OpenAI


class Site(Surroundings):
    """A node whose keys are made by its command."""

    def __init__(self, node: Node, upstream: StubUpstream, node_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(node, upstream)
        self._node_file = node_file
        self._capsys = capsys

    def holder(self, role: str) -> Holder:
        """Return somebody new of the workspace ``team``."""
        self._capsys.readouterr()
        arguments = ["--node", str(self._node_file), "--run-dir", str(self.node.run_dir), "--json"]
        assert main(["keys", "create", "--workspace", "team", "--role", role, *arguments]) == 0
        made = json.loads(self._capsys.readouterr().out)
        base = f"http://127.0.0.1:{self.node.ports['http_port']}/v1"
        return Holder(made["key"], made["workspace_id"], openai.OpenAI(api_key=made["key"], base_url=base))

    def manage(self, holder: Holder, method: str, path: str) -> tuple[int, Any]:
        """Call the management API."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.node.ports['http_port']}/api/v1{path}", method=method,
            headers={"Authorization": f"Bearer {holder.key}"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Site]:
    (tmp_path / "models").mkdir()
    node_file = tmp_path / "node.yaml"
    with StubUpstream() as upstream:
        upstream.default = lambda seen: Say(body=completion("inner", seen.json["messages"][0]["content"]))
        node_file.write_text(NODE_FILE.format(url=upstream.url))
        with Node(tmp_path / "models", tmp_path / "run", frontends=1, node_file=node_file) as node:
            found = Site(node, upstream, node_file, capsys)
            yield found
            found.client.close()


def test_bf_03_a_cancel_outlives_the_runner_it_was_meant_for(site: Site) -> None:
    """Cancel, kill the runner before it can act, cancel again: the same object, and it ends cancelled."""
    release = threading.Event()
    site.upstream.default = lambda seen: Say(body=completion("inner", "late"), hold=release)
    batch = site.batch("/v1/chat/completions", [chat(f"t{i}") for i in range(20)])
    site.upstream.wait(lambda stub: stub.in_flight >= 1)
    first = site.client.batches.cancel(batch.id)
    os.kill(site.process()["pid"], signal.SIGKILL)
    again = site.client.batches.cancel(batch.id)
    assert first.status == again.status == "cancelling"
    assert first.cancelling_at == again.cancelling_at
    called = len(site.upstream.calls)
    done, output, errors = site.ended(batch.id)
    release.set()
    assert done.status == "cancelled" and not output
    codes = {one["error"]["code"] for one in errors}
    assert len(errors) == 20 and codes == {"batch_cancelled", "result_unavailable"}
    assert len(site.upstream.calls) == called, "nothing was started after the cancel"
    with pytest.raises(openai.ConflictError) as caught:
        site.client.batches.cancel(batch.id)
    assert caught.value.code == "batch_not_cancellable"
    assert site.client.batches.retrieve(batch.id) == done


def test_bf_23_every_route_takes_the_ids_that_another_gave_out(site: Site) -> None:
    site.upstream.default = lambda seen: (
        Say(status=400, body={"error": {"message": "no", "type": "invalid_request_error"}})
        if seen.json["messages"][0]["content"] == "t1"
        else Say(body=completion("inner", "yes"))
    )
    batch = site.batch("/v1/chat/completions", [chat(f"t{i}") for i in range(3)])
    done, output, errors = site.ended(batch.id)
    assert (len(output), len(errors)) == (2, 1)
    files = site.client.files
    listed = {one.id for one in files.list()}
    given = {done.input_file_id, done.output_file_id, done.error_file_id}
    assert given == listed
    for file_id in given:
        assert files.retrieve(file_id).id == file_id
        assert files.content(file_id).read()
        deleted = files.delete(file_id)
        assert (deleted.id, deleted.deleted) == (file_id, True)
        for call in (files.retrieve, files.content, files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    assert list(files.list()) == [], "nothing is left that uses up a quota"
    assert site.client.batches.retrieve(done.id) == done, "and the batch stays readable"
    assert [one.id for one in site.client.batches.list()] == [done.id]


def test_st_02_who_cancels_does_not_become_the_owner(site: Site) -> None:
    owner, colleague, admin = site.holder("member"), site.holder("member"), site.holder("workspace_admin")
    release = threading.Event()
    site.upstream.default = lambda seen: Say(body=completion("inner", "late"), hold=release)
    owned = Surroundings.batch
    site.client, ours = owner.client, site.client
    batch = owned(site, "/v1/chat/completions", [chat(f"t{i}") for i in range(6)])
    site.upstream.wait(lambda stub: stub.in_flight >= 1)
    path = f"/workspaces/{owner.workspace_id}/batches/{batch.id}"
    assert site.manage(colleague, "POST", f"{path}/cancel")[0] in (403, 404), "a colleague's batch is not one's own"
    status, _ = site.manage(admin, "POST", f"{path}/cancel")
    assert status == 200
    release.set()
    done, output, errors = site.ended(batch.id)
    assert done.status == "cancelled" and output and errors, "read by its owner"
    row = until("the batch is listed", lambda: _row(site, owner, batch.id))
    assert row["mine"] is True
    assert {one.id for one in owner.client.files.list()} == {
        done.input_file_id, done.output_file_id, done.error_file_id,
    }  # fmt: skip
    site.client = ours
    with pytest.raises(openai.NotFoundError):
        ours.files.retrieve(done.output_file_id)


def _row(site: Site, holder: Holder, batch_id: str) -> dict[str, Any] | None:
    status, listed = site.manage(holder, "GET", f"/workspaces/{holder.workspace_id}/batches")
    assert status == 200, listed
    return next((row for row in listed["data"] if row["id"] == batch_id), None)
