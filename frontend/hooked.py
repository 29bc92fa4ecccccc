"""Models with a ``model.py``: loading their hooks in this process, and the life of their requests.

Hooks are loaded on a thread when the worker announces the model, once per process and version. Until then, and for good
if ``load`` fails, the model is not ready in this frontend and the frontend says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engines.bundle.signature import Signature
from engines.bundle.variants import compiled_text
from engines.errors import HookFailed, InvalidInput, NotReady, ServingError
from engines.tensor import NDArray
from frontend.hooks.check import check_tensors
from frontend.hooks.context import Context
from frontend.hooks.load import Hooks, load_hooks, require_hooks
from frontend.hooks.run import HookRunner, Mode, place
from frontend.inference import InferRequest, InferResponse
from frontend.kserve.checks import Checked
from worker.channel.messages import ModelEntry

if TYPE_CHECKING:
    from frontend.app import FrontendApp
    from frontend.infer_call import InferCall

log = logging.getLogger("frontend.hooks")


@dataclass(slots=True)
class HookedModel:
    """One model version's hooks in this process. ``hooks`` is None while they load, or if they failed."""

    entry: ModelEntry
    runner: HookRunner
    hooks: Hooks | None = None
    failure: str = ""
    loading: asyncio.Task[None] | None = field(default=None)


class HookedModels:
    """All hooks of one frontend. ``on_change`` is called when a model's hooks became usable or failed."""

    def __init__(self, threads: int, on_change: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="hook")
        # Loading may take seconds and must not wait behind requests, nor they behind it.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="hook-load")
        self._on_change = on_change
        self._models: dict[int, HookedModel] = {}
        self._app: FrontendApp | None = None

    def start(self, app: FrontendApp) -> None:
        """Bind to the app whose channel executes."""
        self._app = app

    def update(self, entries: list[ModelEntry]) -> None:
        """Load hooks of new models, forget those of models that are gone."""
        wanted = {entry.model_id: entry for entry in entries if entry.model_py and entry.signature is not None}
        for model_id in [model_id for model_id in self._models if model_id not in wanted]:
            model = self._models.pop(model_id)
            if model.hooks is not None:
                model.hooks.close()
        for model_id, entry in wanted.items():
            known = self._models.get(model_id)
            # Ids start again with a new worker: the same number may mean another model.
            if known is not None and known.entry == entry:
                continue
            if known is not None and known.hooks is not None:
                known.hooks.close()
            model = HookedModel(entry, HookRunner(cast(Mode, entry.hooks), self._executor))
            model.loading = asyncio.get_running_loop().create_task(self._load(model))
            self._models[model_id] = model

    def broken(self) -> str:
        """Return which models' hooks are not usable, and why; empty if all are."""
        return "; ".join(
            f"{model.entry.name}/{model.entry.version} {model.failure or 'loading model.py'}"
            for model in self._models.values()
            if model.hooks is None
        )

    def loading(self) -> bool:
        """Whether some model's hooks are still being loaded."""
        return any(model.hooks is None and not model.failure for model in self._models.values())

    def close(self) -> None:
        """Forget all hooks; threads that run end by themselves."""
        for model in self._models.values():
            if model.loading is not None:
                model.loading.cancel()
            if model.hooks is not None:
                model.hooks.close()
        self._models.clear()
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: InferCall, request: InferRequest, checked: Checked) -> InferResponse:
        """Preprocess, execute, postprocess; the response owns the shared memory its arrays may borrow.

        Raises:
            ServingError: NotReady while hooks load; whatever a hook, a check or the worker says.
        """
        assert call.entry is not None and call.entry.signature is not None
        model = self._model(call.entry)
        signature = call.entry.signature
        hooks = model.hooks
        assert hooks is not None
        ctx = Context(
            model=call.entry.name,
            version=call.entry.version,
            request_id=request.request_id,
            parameters=request.parameters,
            deadline_ns=call.deadline_ns,
            state=hooks.state,
        )
        client_inputs = {given.spec.name: given.as_array() for given in checked.inputs}
        prepared = await model.runner.preprocess(hooks, client_inputs, ctx)
        inputs, rows = check_tensors(signature.inputs, prepared, place(ctx, "preprocess"))
        if hooks.preprocess is None:
            rows = checked.rows
        if rows == 0:
            raise HookFailed(f"{place(ctx, 'preprocess')} returned 0 rows, expected at least 1")
        _refuse_unsplittable(signature, inputs, rows, checked.rows)
        execution = await call.execute(list(inputs.values()), rows if rows is not None else 1)
        outputs = _by_name(signature, execution.outputs)
        returned = await model.runner.postprocess(hooks, outputs, ctx, execution.release)
        try:
            client_outputs, _ = check_tensors(signature.client_outputs, returned, place(ctx, "postprocess"))
            return call.respond(execution.outputs, execution.release, client_outputs)
        except BaseException:
            execution.release()
            raise

    def _model(self, entry: ModelEntry) -> HookedModel:
        model = self._models.get(entry.model_id)
        if model is None or model.hooks is None:
            reason = model.failure if model is not None and model.failure else "model.py is still loading"
            raise NotReady(f"model '{entry.name}' version {entry.version} is not at ready state: {reason}")
        return model

    async def _load(self, model: HookedModel) -> None:
        entry = model.entry
        loop = asyncio.get_running_loop()
        try:
            hooks = await loop.run_in_executor(
                self._loader,
                lambda: load_hooks(Path(entry.path), Path(entry.model_py), model=entry.name, version=entry.version),
            )
            assert entry.signature is not None
            require_hooks(hooks, entry.signature, model=entry.name, version=entry.version)
            model.hooks = hooks
        except ServingError as error:
            model.failure = str(error)
            log.error("hooks.failed model=%s version=%s reason=%s", entry.name, entry.version, error)
        except Exception as error:
            model.failure = f"loading model.py failed: {type(error).__name__}"
            log.exception("hooks.failed model=%s version=%s", entry.name, entry.version)
        else:
            log.info("hooks.ready model=%s version=%s", entry.name, entry.version)
        self._on_change()


def _refuse_unsplittable(
    signature: Signature, inputs: Mapping[str, NDArray], rows: int | None, client_rows: int
) -> None:
    """Refuse rows beyond every compiled size unless they are the client's: only those are cut in pieces (rule 17).

    Raises:
        InvalidInput: with the shapes that would have fitted.
    """
    if rows is not None and signature.coalesces and rows > signature.max_rows and rows != client_rows:
        shapes = [inputs[spec.name].shape for spec in signature.inputs]
        raise InvalidInput(
            f"{compiled_text(signature, shapes)}; preprocess made {rows} rows of {client_rows}, only a request whose"
            f" rows it keeps is split into batches of {signature.max_rows}"
        )


def _by_name(signature: Signature, arrays: list[NDArray]) -> dict[str, NDArray]:
    return {spec.name: array for spec, array in zip(signature.outputs, arrays, strict=True)}
