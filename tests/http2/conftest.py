"""Every test runs twice: with an application that opens all requests, and with one that takes whole ones as such."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from h2_wire import EchoApp


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["opened", "whole"])
def takes_whole(request: pytest.FixtureRequest) -> Iterator[bool]:
    EchoApp.takes_whole = request.param
    yield request.param
    EchoApp.takes_whole = False
