"""FastAPI with the model inline, one process, no batching: bare float32 at ``/raw``, {"X": [...]} at ``/json``."""

from __future__ import annotations

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from onnx_session import OnnxModel, port, row_shape

app = FastAPI()
model = OnnxModel()
shape = (1, *row_shape())


async def raw(request: Request) -> Response:
    rows = np.frombuffer(await request.body(), np.float32).reshape(shape)
    return Response(model.run(rows).tobytes(), media_type="application/octet-stream")


async def as_json(request: Request) -> dict[str, list[float]]:
    rows = np.asarray((await request.json())["X"], np.float32).reshape(shape)
    return {"Y": model.run(rows).ravel().tolist()}


# Not by decorator: annotations are strings here, and FastAPI resolves them in this module's names.
app.add_api_route("/raw", raw, methods=["POST"])
app.add_api_route("/json", as_json, methods=["POST"])

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=port(), access_log=False, log_level="warning")
