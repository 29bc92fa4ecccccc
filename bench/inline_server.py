"""The comparison server: the same HTTP frontend, with the model run inline in the one process, no ring and no batching.

    .venv/bin/python bench/inline_server.py --models DIR --port 0

It is what most people write first, built from our own parts, so that a ratio against it shows what the worker, the
rings and coalescing bring and not what another HTTP stack costs. Prints ``port N`` when it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from engines.base import Model
from engines.bundle.repository import Bundle, load_manifest, scan
from engines.errors import ServingError
from engines.onnxruntime import OnnxRuntimeEngine
from engines.probe import resolve
from frontend.http import HttpServer
from frontend.inference import InferRequest, InferResponse, OutputTensor
from frontend.kserve.checks import check
from frontend.kserve.http_routes import KserveApp
from frontend.serving import Call, Done
from frontend.settings import EndpointSettings
from frontend.table import ModelTable
from worker.channel.messages import ModelEntry


class NoCall:
    """Nothing to cancel: the answer came before ``start`` returned."""

    def cancel(self) -> None: ...


class InlineServing:
    """``frontend.serving.Serving`` that executes on the event loop."""

    def __init__(self, root: Path, limits: EndpointSettings, threads: int) -> None:
        self._limits = limits
        self._table = ModelTable()
        self._models: dict[int, Model] = {}
        engine = OnnxRuntimeEngine(threads=threads)
        entries = []
        for number, bundle in enumerate(scan(root), 1):
            assert isinstance(bundle, Bundle)
            manifest = load_manifest(bundle)
            model = engine.open(manifest, bundle.model_file)
            signature = resolve(model, manifest)
            self._models[number] = model
            entries.append(
                ModelEntry(
                    model_id=number, name=bundle.name, version=bundle.version, state="READY", signature=signature,
                    platform="onnxruntime", max_batch_size=signature.max_rows,
                )
            )  # fmt: skip
        self._table.update(entries)

    @property
    def limits(self) -> EndpointSettings:
        return self._limits

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return True

    def draining(self) -> bool:
        return False

    def entries(self) -> list[ModelEntry]:
        return self._table.entries()

    def entry(self, model: str, version: str = "") -> ModelEntry:
        return self._table.entry(model, version)

    def versions(self, model: str) -> list[str]:
        return self._table.versions(model)

    def start(self, request: InferRequest, arrival_ns: int, done: Done) -> Call:
        try:
            outcome: InferResponse | ServingError = self._infer(request)
        except ServingError as error:
            outcome = error
        done(outcome)
        return NoCall()

    async def infer(self, request: InferRequest, arrival_ns: int) -> InferResponse:
        return self._infer(request)

    async def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        return []

    def _infer(self, request: InferRequest) -> InferResponse:
        entry = self._table.entry(request.model, request.version)
        checked = check(request, entry, self._limits)
        arrays = self._models[entry.model_id].run([given.as_array() for given in checked.inputs])
        assert entry.signature is not None
        outputs = [
            OutputTensor(spec.name, spec.element.wire, array)
            for spec, array in zip(entry.signature.outputs, arrays, strict=True)
        ]
        return InferResponse(entry.name, entry.version, request.request_id, outputs)


async def serve(root: Path, port: int, threads: int) -> None:
    """Serve until killed."""
    limits = EndpointSettings()
    server = HttpServer(KserveApp(InlineServing(root, limits, threads)), "127.0.0.1", port, limits)
    print(f"port {await server.start()}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.models, arguments.port, arguments.threads))


if __name__ == "__main__":
    main()
