"""LitServe: one endpoint ``/json`` with its batcher; the window is 1 ms, since at 0 its loop spins on a whole core."""

import litserve
import numpy as np
from onnx_session import MAX_BATCH, OnnxModel, port, row_shape


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self._model = OnnxModel()
        self._shape = row_shape()

    # LitServe reads the parameter's name and annotation: another name ends the server at its start, an annotation makes
    # it a query parameter.
    def decode_request(self, request):
        return np.asarray(request["X"], np.float32).reshape(self._shape)

    def predict(self, x: list) -> np.ndarray:
        return self._model.run(np.asarray(x))

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, list[float]]:
        return {"Y": output.ravel().tolist()}


if __name__ == "__main__":
    api = Api(api_path="/json", max_batch_size=MAX_BATCH, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, track_requests=False)
    server.run(
        host="127.0.0.1", port=port(), num_api_servers=1, generate_client_file=False, log_level="warning",
        access_log=False,
    )  # fmt: skip
