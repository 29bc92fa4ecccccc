"""The pages of a whole node: what they say follows what its processes do, whichever frontend answers."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest
from http_visitor import WAIT_S, Visitor

import openai
from real_node import Node, until
from stub_upstream import Say, StubUpstream, completion

pytestmark = pytest.mark.process

NODE_FILE = """
gateway:
  enabled: true
  development: true
  models:
    - name: chat
      routes:
        - {{id: chat-1, kind: vllm, endpoint: "{url}", addresses: ["127.0.0.1"], upstream_model: inner}}
  batches: {{workers: 8}}
"""


@dataclass
class Around:
    """A node with two frontends and an upstream."""

    node: Node
    upstream: StubUpstream
    key: str

    @property
    def port(self) -> int:
        return int(self.node.ports["http_port"])

    def sign_ins(self) -> list[int]:
        """Return what each frontend says to a good key."""
        form = urlencode({"key": self.key}).encode()
        kind = {"Content-Type": "application/x-www-form-urlencoded", "Origin": f"http://127.0.0.1:{self.port}"}
        return self.on_each("POST", "/ui/sign-in", kind, form)

    def visits(self, cookie: str) -> list[int]:
        """Return what each frontend says to a cookie."""
        return self.on_each("GET", "/ui/batches", {"Cookie": cookie})

    def on_each(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> list[int]:
        """Ask both frontends: of two connections that are open at once, each has one."""
        connections = [http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S) for _ in range(2)]
        try:
            for connection in connections:
                connection.connect()
            found = []
            for connection in connections:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                answer.read()
                found.append(answer.status)
            return found
        finally:
            for connection in connections:
                connection.close()

    def visitor(self) -> Visitor:
        return Visitor(self.port).sign_in(self.key)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(api_key=self.key, base_url=f"http://127.0.0.1:{self.port}/v1", max_retries=4)


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Around]:
    directory: Path = tmp_path_factory.mktemp("pages-node")
    (directory / "models").mkdir()
    with StubUpstream() as upstream:
        upstream.default = lambda seen: Say(body=completion("inner", "fine"))
        node_file = directory / "node.yaml"
        node_file.write_text(NODE_FILE.format(url=upstream.url))
        with Node(directory / "models", directory / "run", frontends=2, node_file=node_file, wait_ready=False) as node:
            key = node.wait_line("ringserve development key: ").rpartition(" ")[2]
            ready = node.wait_line("ringserve is ready: ", 60.0)
            found = Around(node, upstream, key)
            until("the ports are open", lambda: "http_port" in (node.ports or {}))
            assert f"  pages http://127.0.0.1:{found.port}/ui  " in ready, "the node says where its pages are"
            until("everybody has a store", lambda: found.sign_ins() == [303, 303])
            yield found


def text_of(body: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_a_batch_gives_way_to_live_traffic_before_everybodys_eyes(around: Around) -> None:
    one = around.visitor()
    one.get("/ui/routes")
    saved = one.post("/ui/routes/chat-1/edit", {"max_concurrency": "2", "yield_live_threshold": "1", "do": "save"})
    assert saved.status == 303, saved.body
    held = threading.Event()
    around.upstream.say(Say(body=completion("inner", "live"), hold=held))
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
    with around.client() as client:
        live = threading.Thread(target=lambda: client.chat.completions.create(model="chat", messages=messages))
        live.start()
        try:
            around.upstream.wait(lambda stub: stub.in_flight == 1)
            sent: list[str] = []

            def held_back() -> str:
                # Rule 21: the runner acts on settings within 5 s, and tells nobody; until then a batch runs as before.
                if not sent or "Download output" in text_of(one.get(sent[-1]).body):
                    sent.append(f"/ui/batches/{send_batch(client, 4)}")
                return sent[-1] if "Yielding to live traffic" in text_of(one.get(sent[-1]).body) else ""

            page = until("the reason is shown", held_back)
            assert "Queued — waiting for capacity" in text_of(one.get(f"{page}/live", {"X-Live": "1"}).body)
            until("the tile says so", lambda: "1 live in flight" in text_of(one.get("/ui/routes/chat-1/live").body))
            assert around.upstream.in_flight == 1
        finally:
            held.set()
            live.join()
    until("the batch ends", lambda: "Download output" in text_of(one.get(page).body))
    assert "4 of 4 lines" in text_of(one.get(page).body)
    lines = [json.loads(line) for line in one.get(f"{page}/output").body.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == ["c0", "c1", "c2", "c3"]
    until(
        "the chart has both",
        lambda: "Yielding to live traffic" in (shown := text_of(one.get("/ui/routes/chat-1").body)) and "Open" in shown,
    )


def send_batch(client: openai.OpenAI, lines: int) -> str:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    url = "/v1/chat/completions"
    text = "\n".join(
        json.dumps({"custom_id": f"c{at}", "method": "POST", "url": url, "body": body}) for at in range(lines)
    )
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return made.id


def test_a_session_holds_on_every_frontend_and_ends_on_every_frontend(around: Around) -> None:
    one = around.visitor()
    copied = one.cookie
    one.get("/ui/batches")
    assert around.visits(copied) == [200, 200]
    assert one.post("/ui/sign-out", {}).status == 303
    assert around.visits(copied) == [303, 303]
