"""From node file, environment and command line to frozen settings, or to the list of everything that is wrong.

Precedence: defaults < file < environment < command line. All mistakes are reported together, each with its path. Where
each value came from is remembered for ``ringserve config``.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from frontend import options
from frontend.control.endpoint import BadEndpoint, TcpEndpoint, parse_endpoint
from frontend.gateway_config import VARIABLES, GatewayReading
from frontend.gateway_settings import GatewaySettings
from frontend.gpus import read_gpus
from frontend.model_options import MODELS_VARIABLE, read_models
from frontend.options import BY_ENVIRONMENT, ENVIRONMENT_PREFIX, OPTIONS, SECTIONS, BadValue, unknown_keys
from frontend.settings import ControlSettings, Count, EndpointSettings, FrontendSettings, GrpcSettings
from worker.config import ChannelSettings, RuntimeSettings, SchedulerSettings, WorkerSettings

MAX_WORKERS = 1
_BACKEND = "global.runtime.backend"
_TOP_KEYS = ("model_repo", "run_dir", "frontends", "gpus", "global", "workers", "models", "gateway")
_DEFAULT_SOURCE = "default"


class ConfigError(Exception):
    """The configuration has mistakes; ``mistakes`` has one line for each, starting with its path."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a node runs with.

    Attributes:
        frontends: number of frontend processes, ``auto`` resolved.
        gpus: device numbers; empty means any, if ``runtime.backend`` asks for one.
        workers: names of the worker processes.
        pins: model name -> workers that may serve it.
        notices: things the operator should be told once at start.
    """

    model_repo: str
    run_dir: str
    frontends: int
    gpus: tuple[int, ...]
    model_control_mode: str
    model_poll_seconds: float
    runtime: RuntimeSettings
    scheduler: SchedulerSettings
    endpoints: EndpointSettings
    grpc: GrpcSettings
    channel: ChannelSettings
    control: ControlSettings
    workers: tuple[str, ...]
    pins: dict[str, tuple[str, ...]]
    gateway: GatewaySettings = GatewaySettings()
    notices: tuple[str, ...] = ()

    def worker(self, name: str, run_dir: str, generation: int) -> WorkerSettings:
        """Return the settings of one worker process."""
        return WorkerSettings(
            name=name,
            run_dir=run_dir,
            model_repo=self.model_repo,
            # Reloading does not exist yet: whatever the mode, models are loaded once at start (see ``notices``).
            control_mode="static",
            poll_seconds=self.model_poll_seconds,
            generation=generation,
            gpus=self.gpus,
            scheduler=self.scheduler,
            runtime=self.runtime,
            channel=self.channel,
        )

    def frontend(
        self, name: str, run_dir: str, worker_sockets: tuple[str, ...], ports: Mapping[str, int]
    ) -> FrontendSettings:
        """Return the settings of one frontend process; ``ports`` are the real ones, never 0."""
        return FrontendSettings(
            name=name,
            run_dir=run_dir,
            worker_sockets=worker_sockets,
            endpoints=msgspec.structs.replace(self.endpoints, **ports),
            grpc=self.grpc,
            channel=self.channel,
            dispatch_timeout_seconds=self.scheduler.dispatch_timeout_seconds,
            gateway=self.gateway,
        )


@dataclass(frozen=True, slots=True)
class Flag:
    """A value from the command line: the option as typed, and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the source of every value by path: ``default``, the file, a variable or a command-line option."""

    settings: NodeSettings
    sources: dict[str, str]


def default_run_dir(environ: Mapping[str, str]) -> str:
    """Return where a node keeps sockets and state unless told otherwise."""
    state = environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that a relative path there is to be ignored.
    base = Path(state) if os.path.isabs(state) else Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    return str(base / "ringserve")


def load(
    node_file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Flag],
    auto_frontends: Callable[[], int],
    *,
    need_models: bool,
    need_upstream_keys: bool = True,
) -> Loaded:
    """Return the effective settings.

    Args:
        flags: command-line values by path, such as ``global.endpoints.http_port`` or ``model_repo``.
        auto_frontends: gives the number for ``frontends: auto``.
        need_models: whether a model repository that does not exist is a mistake.
        need_upstream_keys: whether a variable that should hold an upstream's key has to be set.

    Raises:
        ConfigError: with every mistake there is.
    """
    reading = _Reading(environ, flags, auto_frontends, str(node_file or ""), need_models, need_upstream_keys)
    document: dict[str, Any] = {}
    if node_file is not None:
        from frontend.node_file import NodeFileError, read_node_file

        try:
            document = read_node_file(node_file)
        except NodeFileError as error:
            raise ConfigError([str(error)]) from None
    settings = reading.read(document)
    if settings is None:
        raise ConfigError(reading.mistakes)
    return Loaded(settings, reading.sources)


@dataclass(slots=True)
class _Reading:
    """One pass over all sources; collects values, their sources and mistakes."""

    environ: Mapping[str, str]
    flags: Mapping[str, Flag]
    auto_frontends: Callable[[], int]
    file_name: str
    need_models: bool
    need_upstream_keys: bool
    sources: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def read(self, document: dict[str, Any]) -> NodeSettings | None:
        self._unknown("", document, _TOP_KEYS)
        values = self._scalars(self._mapping("global", document.get("global")))
        models = read_models(document, self.environ, self.file_name)
        self.sources |= models.sources
        self.mistakes += models.mistakes
        top: dict[str, Any] = {
            "model_repo": self._model_repo(document),
            "run_dir": self._run_dir(document),
            "frontends": self._frontends(document),
            "gpus": self._gpus(document, values),
        }
        gateway = self._gateway(document, values, top["run_dir"])
        workers = self._workers(document)
        pins = self._pins(document, workers)
        self._unknown_variables()
        self._cross_checks(values, top["frontends"] + gateway.runs_batches, workers)
        if self.mistakes:
            return None
        if values["global.model_control_mode"] == "dynamic":
            self.notices.append(
                "model_control_mode dynamic: models are loaded once at start, changes need a restart;"
                " watching the repository is not available yet"
            )
        if values["global.scheduler.compaction_interval"]:
            self.notices.append("scheduler.compaction_interval: no effect, weights are not loaded on demand yet")
        sections: dict[str, Any] = {}
        # Inner sections first: they are fields of the outer ones.
        for section in sorted(SECTIONS, key=lambda name: -name.count(".")):
            fields = {o.key: values[o.path] for o in OPTIONS if o.section == section}
            for inner in [name for name in sections if name.rpartition(".")[0] == section]:
                fields[inner.rpartition(".")[2]] = sections.pop(inner)
            if section == "scheduler":
                fields["models"] = models.settings
            sections[section] = SECTIONS[section](**fields)
        return NodeSettings(
            **top,
            **sections,
            gateway=gateway,
            model_control_mode=values["global.model_control_mode"],
            model_poll_seconds=values["global.model_poll_seconds"],
            workers=workers,
            pins=pins,
            notices=tuple(self.notices),
        )

    def _mistake(self, path: str, text: str, source: str = "") -> None:
        self.mistakes.append(f"{path}: {text}" + (f" (from {source})" if source else ""))

    def _unknown(self, path: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
        self.mistakes += unknown_keys(path, found, known)

    def _mapping(self, path: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return value
        self._mistake(path, f"expected a mapping, got {reprlib.repr(value)}")
        return {}

    def _pick(self, path: str, document: Mapping[str, Any], key: str) -> tuple[Any, str]:
        """Return the value of highest precedence of a key outside ``global``, and its source; None if unset."""
        if path in self.flags:
            flag = self.flags[path]
            return flag.text, f"command line {flag.name}"
        if document.get(key) is not None:
            return document[key], f"file {self.file_name}"
        return None, _DEFAULT_SOURCE

    def _scalars(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the value of every option by path; a wrong one is a mistake and counts as its default."""
        top = tuple(o.key for o in OPTIONS if not o.section)
        self._unknown("global", tree, (*top, *(name for name in SECTIONS if "." not in name)))
        groups: dict[str, dict[str, Any]] = {}
        for name in SECTIONS:
            outer, _, key = name.rpartition(".")
            groups[name] = self._mapping(f"global.{name}", (groups[outer] if outer else tree).get(key))
        for section, group in groups.items():
            keys = tuple(f.name for f in msgspec.structs.fields(SECTIONS[section]))
            self._unknown(f"global.{section}", group, keys)
        values: dict[str, Any] = {}
        for option in OPTIONS:
            group = groups[option.section] if option.section else tree
            values[option.path] = option.default
            self.sources[option.path] = _DEFAULT_SOURCE
            # A lower source that is overridden is checked as well: a mistake there would only surface later.
            for value, source, text in self._candidates(option, group):
                try:
                    values[option.path] = options.convert(option.path, option.kind, value, text=text)
                    self.sources[option.path] = source
                except BadValue as error:
                    self._mistake(option.path, str(error), "" if source.startswith("file") else source)
        return values

    def _candidates(self, option: options.Option, group: Mapping[str, Any]) -> list[tuple[Any, str, bool]]:
        """Return an option's values from lowest to highest precedence."""
        found: list[tuple[Any, str, bool]] = []
        if option.key in group:
            found.append((group[option.key], f"file {self.file_name}", False))
        if option.environment in self.environ:
            found.append((self.environ[option.environment], f"environment {option.environment}", True))
        if option.path in self.flags:
            flag = self.flags[option.path]
            found.append((flag.text, f"command line {flag.name}", True))
        return found

    def _directory(self, path: str, document: Mapping[str, Any], default: str) -> str:
        value, self.sources[path] = self._pick(path, document, path)
        if value is None:
            value = default
        if not isinstance(value, str) or not value or "\0" in value:
            self._mistake(path, f"expected a directory, got {reprlib.repr(value)}")
            return ""
        # A path in a file means the same wherever the command is run from.
        base = Path(self.file_name).absolute().parent if self.sources[path].startswith("file") else Path.cwd()
        return os.path.normpath(base / os.path.expanduser(value))

    def _model_repo(self, document: Mapping[str, Any]) -> str:
        directory = self._directory("model_repo", document, "./models")
        if self.need_models and directory and not os.path.isdir(directory):
            what = "is not a directory" if os.path.exists(directory) else "does not exist"
            self._mistake("model_repo", f"{directory} {what}; give --models DIR", self.sources["model_repo"])
        return directory

    def _run_dir(self, document: Mapping[str, Any]) -> str:
        return self._directory("run_dir", document, default_run_dir(self.environ))

    def _frontends(self, document: Mapping[str, Any]) -> int:
        value, source = self._pick("frontends", document, "frontends")
        self.sources["frontends"] = source
        if value is None or value == "auto":
            return self.auto_frontends()
        try:
            return int(options.convert("frontends", Count, value, text=source.startswith("command")))
        except BadValue as error:
            self._mistake("frontends", f"auto, or {error}", "" if source.startswith("file") else source)
            return 1

    def _gpus(self, document: Mapping[str, Any], values: dict[str, Any]) -> tuple[int, ...]:
        value, self.sources["gpus"] = self._pick("gpus", document, "gpus")
        try:
            gpus, values[_BACKEND] = read_gpus(value, values[_BACKEND])
        except ValueError as error:
            self._mistake("gpus", str(error))
            return ()
        return gpus

    def _gateway(self, document: Mapping[str, Any], values: Mapping[str, Any], run_dir: str) -> GatewaySettings:
        reading = GatewayReading(
            self.environ, {path: flag.text for path, flag in self.flags.items()}, self.file_name,
            os.path.join(run_dir, "gateway"), values["global.endpoints.max_request_bytes"],
            self.need_upstream_keys, self.sources, self.mistakes, self.notices,
        )  # fmt: skip
        return reading.read(document.get("gateway"))

    def _workers(self, document: Mapping[str, Any]) -> tuple[str, ...]:
        value, self.sources["workers"] = self._pick("workers", document, "workers")
        if value is None:
            return ("worker0",)
        if not isinstance(value, list) or not value:
            self._mistake("workers", f"expected a list such as [{{name: worker0}}], got {reprlib.repr(value)}")
            return ("worker0",)
        names: list[str] = []
        for index, item in enumerate(value):
            entry = self._mapping(f"workers[{index}]", item)
            self._unknown(f"workers[{index}]", entry, ("name",))
            name = entry.get("name")
            if not isinstance(name, str) or not name.isidentifier():
                self._mistake(f"workers[{index}].name", f"expected a name such as worker0, got {reprlib.repr(name)}")
            elif name in names:
                self._mistake(f"workers[{index}].name", f"{name!r} is given twice")
            else:
                names.append(name)
        if len(value) > MAX_WORKERS:
            self._mistake("workers", f"{len(value)} workers: more than {MAX_WORKERS} is not available yet")
        return tuple(names)

    def _pins(self, document: Mapping[str, Any], workers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        pins: dict[str, tuple[str, ...]] = {}
        for model, names in self._mapping("models", document.get("models")).items():
            self.sources[f"models.{model}"] = f"file {self.file_name}"
            if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
                self._mistake(f"models.{model}", f"expected a list of workers, got {reprlib.repr(names)}")
                continue
            for name in names:
                if name not in workers:
                    self._mistake(f"models.{model}", f"no worker {name!r}; workers: {', '.join(workers)}")
            pins[model] = tuple(names)
        return pins

    def _unknown_variables(self) -> None:
        import difflib

        known = [*BY_ENVIRONMENT, MODELS_VARIABLE, *VARIABLES]
        for name in sorted(self.environ):
            if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else "; 'ringserve config' lists the known ones"
                self._mistake(name, f"unknown environment variable{hint}")

    def _cross_checks(self, values: Mapping[str, Any], channels: int, workers: tuple[str, ...]) -> None:
        """Compare settings that are each right alone; ``channels`` are frontends and the batch runner."""
        limit = values["global.channel.max_channels"]
        if channels > limit:
            self._mistake("frontends", f"{channels} is above global.channel.max_channels ({limit})")
        taken: dict[int, str] = {}
        for key in ("http_port", "grpc_port", "metrics_port"):
            path = f"global.endpoints.{key}"
            port = values[path]
            if port and port in taken:
                self._mistake(path, f"{port} is also {taken[port]}; two servers cannot share a port")
            taken.setdefault(port, path)
        path = "global.control.endpoint"
        try:
            endpoint = parse_endpoint(
                values[path],
                allow_remote=values["global.control.allow_remote"],
                workers=workers,
            )
        except BadEndpoint as error:
            self._mistake(path, str(error), self.sources[path])
            return
        if isinstance(endpoint, TcpEndpoint) and endpoint.port in taken and endpoint.port:
            self._mistake(path, f"{endpoint.port} is also {taken[endpoint.port]}; two servers cannot share a port")
