"""A browser without a screen: keeps its cookie, sends what it is told to, follows nothing by itself."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass, field
from urllib.parse import urlencode

WAIT_S = 30.0
FORM_TOKEN = re.compile(r'name="form_token" value="([0-9a-f]+)"')


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: str

    @property
    def location(self) -> str:
        return self.headers.get("Location", "")


@dataclass
class Visitor:
    """Attributes: ``cookie`` as a browser would send it; ``form_token`` of the last page with a form."""

    port: int
    cookie: str = ""
    form_token: str = ""
    host: str = ""
    seen: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = self.host or f"127.0.0.1:{self.port}"

    @property
    def origin(self) -> str:
        return f"http://{self.host}"

    def sign_in(self, key: str) -> Visitor:
        answer = self.post("/ui/sign-in", {"key": key})
        assert answer.status == 303, answer.body
        return self

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Answer:
        return self.send(method, path, None, headers or {})

    def post(
        self,
        path: str,
        fields: dict[str, str | list[str]],
        headers: dict[str, str] | None = None,
        *,
        token: bool = True,
    ) -> Answer:
        """Send a form as a page of ours would; ``headers`` of None value are left out."""
        if token and self.form_token:
            fields = {"form_token": self.form_token, **fields}
        sent = {"Origin": self.origin, "Content-Type": "application/x-www-form-urlencoded", **(headers or {})}
        return self.send("POST", path, urlencode(fields, doseq=True).encode(), sent)

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            own = {"Host": self.host, **({"Cookie": self.cookie} if self.cookie else {})}
            connection.request(method, path, body, {**own, **headers})
            got = connection.getresponse()
            answer = Answer(got.status, got.headers, got.read().decode())
        finally:
            connection.close()
        for cookie in answer.headers.get_all("Set-Cookie", []):
            self.cookie = cookie.partition(";")[0]
        if found := FORM_TOKEN.search(answer.body):
            self.form_token = found[1]
        self.seen.append(answer)
        return answer
