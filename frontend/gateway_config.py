"""The ``gateway`` section of the node file: from text to settings, or to everything that is wrong with it.

Scalars may also come from the environment, ``INFERENCE_SERVER_GATEWAY_<KEY>`` (``..._FILES_<KEY>``,
``..._BATCHES_<KEY>``), which wins over the file. Models and routes are written in the file only.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

from frontend.gateway_settings import GatewaySettings, Identifier, RouteSettings, WebhookSettings
from frontend.openai.addresses import Endpoint, NotApproved, is_private, read_address
from frontend.openai.routes import LOCAL_PREFIX, endpoint_of
from frontend.options import ENVIRONMENT_PREFIX, BadValue, convert

SECTION: Final = "gateway"
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.\[\]:-]+")
_ADDRESS_HOST: Final = re.compile(r"https?://(\[[^\]]*\]|[0-9.]+)(?=[:/]|$)")
_WEBHOOK: Final = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+(?:/[!-\"$-~]*)?")
_ALL: Final = object()


def _scalars(kind: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield variable and path of every scalar below a section."""
    for one in msgspec.structs.fields(kind):
        inner = f"{path}.{one.name}"
        if isinstance(one.type, type) and issubclass(one.type, msgspec.Struct):
            yield from _scalars(one.type, inner)
        elif _element(one.type) is None:
            yield ENVIRONMENT_PREFIX + inner.replace(".", "_").upper(), inner


def _element(kind: Any) -> Any:
    """Return T of ``tuple[T, ...]``, also within bounds; None for another type."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_args(kind)[0] if get_origin(kind) is tuple else None


VARIABLES: Final = dict(_scalars(GatewaySettings, SECTION))
"""Environment variables of the section, by name: the path of the setting."""


@dataclass(slots=True)
class GatewayReading:
    """One pass over the section.

    Attributes:
        flags: command-line texts by path.
        default_state_dir: for ``state_dir`` if nothing is given.
        max_request_bytes: of the server that carries live requests.
        need_upstream_keys: whether variables that should hold upstreams' keys have to be set.
    """

    environ: Mapping[str, str]
    flags: Mapping[str, str]
    file_name: str
    default_state_dir: str
    max_request_bytes: int
    need_upstream_keys: bool = True
    sources: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def read(self, given: Any) -> GatewaySettings:
        """Return the settings; only to be used without mistakes."""
        settings: GatewaySettings | None = self._struct(GatewaySettings, {} if given is None else given, SECTION)
        if settings is None:
            return GatewaySettings()
        if self.sources.get("gateway.enabled", "default") == "default" and (settings.models or settings.development):
            # Whoever names models or asks for development wants a gateway.
            settings = msgspec.structs.replace(settings, enabled=True)
        directory = settings.state_dir or self.default_state_dir
        # A path in a file means the same wherever the command is run from.
        in_file = self.sources["gateway.state_dir"].startswith("file")
        base = Path(self.file_name).absolute().parent if in_file else Path.cwd()
        directory = os.path.normpath(base / os.path.expanduser(directory))
        settings = msgspec.structs.replace(settings, state_dir=directory)
        self._check(settings)
        if settings.enabled and settings.development:
            self.notices.append(
                "gateway.development: one key for everything and loopback upstreams; not for a server that others reach"
            )
        return settings

    # Reading

    def _struct(self, kind: Any, given: Any, path: str) -> Any:
        if not isinstance(given, dict):
            self._mistake(path, f"expected a mapping, got {reprlib.repr(given)}")
            return None
        fields = {one.name: one for one in msgspec.structs.fields(kind)}
        for key in given:
            if key not in fields:
                near = difflib.get_close_matches(str(key), fields, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(fields)}"
                self._mistake(f"{path}.{key}", f"unknown key{hint}")
        values: dict[str, Any] = {}
        for name, one in fields.items():
            value = self._field(one, given, f"{path}.{name}")
            if value is not _ALL:
                values[name] = value
        return kind(**values) if all(name in values for name, one in fields.items() if one.required) else None

    def _field(self, one: Any, given: dict[str, Any], path: str) -> Any:
        """Return a field's value, ``_ALL`` if it has none of its own: its default counts."""
        inner = one.type
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            value = self._struct(inner, given.get(one.name) or {}, path)
            return _ALL if value is None else value
        element = _element(inner)
        if element is not None:
            if one.name not in given:
                return self._absent(one, path)
            self._source(path, f"file {self.file_name}")
            return self._list(inner, element, given[one.name], path)
        value, found = _ALL, False
        # A lower source that is overridden is checked as well: a mistake there would only surface later.
        for candidate, source, text in self._candidates(one.name, given, path):
            found = True
            try:
                value = _scalar(path, inner, candidate, text=text)
                self._source(path, source)
            except BadValue as error:
                self._mistake(path, str(error) + ("" if source.startswith("file") else f" (from {source})"))
        return value if found else self._absent(one, path)

    def _candidates(self, key: str, given: dict[str, Any], path: str) -> Iterator[tuple[Any, str, bool]]:
        if given.get(key) is not None:
            yield given[key], f"file {self.file_name}", False
        variable = ENVIRONMENT_PREFIX + path.replace(".", "_").upper()
        if variable in VARIABLES and variable in self.environ:
            yield self.environ[variable], f"environment {variable}", True
        if path in self.flags:
            yield self.flags[path], "command line", True

    def _absent(self, one: Any, path: str) -> Any:
        if one.required:
            self._mistake(path, "is missing")
        self._source(path, "default")
        return _ALL

    def _list(self, kind: Any, element: Any, given: Any, path: str) -> Any:
        if not isinstance(given, list):
            self._mistake(path, f"expected a list, got {reprlib.repr(given)}")
            return _ALL
        bounds = get_args(kind)[1] if get_origin(kind) is Annotated else msgspec.Meta()
        least, most = bounds.min_length or 0, bounds.max_length or len(given)
        if not least <= len(given) <= most:
            self._mistake(path, f"expected {least} to {most} entries, got {len(given)}")
        found: list[Any] = []
        for index, item in enumerate(given):
            where = f"{path}[{index}]"
            if isinstance(element, type) and issubclass(element, msgspec.Struct):
                # A wrong entry keeps its place as None, so that later mistakes name the right ones.
                found.append(self._struct(element, item, where))
                continue
            try:
                found.append(_scalar(where, element, item, text=False))
            except BadValue as error:
                self._mistake(where, str(error))
        return tuple(found)

    def _source(self, path: str, source: str) -> None:
        # Models are shown as one value: a path with a number in it names nothing that could be set elsewhere.
        if "[" not in path:
            self.sources[path] = source

    def _mistake(self, path: str, text: str) -> None:
        self.mistakes.append(f"{path}: {text}")

    # Comparing

    def _check(self, settings: GatewaySettings) -> None:
        """Compare settings that are each right alone."""
        names: dict[str, str] = {}
        ids: dict[str, str] = {}
        places: dict[tuple[str, int], Endpoint] = {}
        for m, model in enumerate(settings.models):
            if not model:
                continue
            path = f"gateway.models[{m}]"
            self._unique(names, model.name, f"{path}.name")
            for r, route in enumerate(model.routes):
                where = f"{path}.routes[{r}]"
                if route:
                    self._unique(ids, route.id, f"{where}.id")
                    self._check_route(route, where, places, development=settings.development)
        # A default that nobody chose is no mistake of a node without a gateway.
        matters = settings.enabled or settings.max_body_bytes != GatewaySettings().max_body_bytes
        if matters and settings.max_body_bytes > self.max_request_bytes:
            self._mistake(
                "gateway.max_body_bytes",
                f"{settings.max_body_bytes} is above global.endpoints.max_request_bytes ({self.max_request_bytes})",
            )
        if settings.store and not settings.store.startswith("postgresql://"):
            # Not shown: it may hold a password.
            self._mistake("gateway.store", "expected nothing for SQLite, or postgresql://...")
        self._check_variable(settings.store_password_env, "gateway.store_password_env")
        url = settings.files.url
        if url and not url.startswith(("file:///", "s3://")):
            self._mistake("gateway.files.url", f"expected nothing, file:///DIR or s3://BUCKET/PREFIX, got {url[:40]!r}")
        if settings.batches.lease_renew_seconds >= settings.batches.lease_seconds:
            self._mistake(
                "gateway.batches.lease_renew_seconds",
                f"expected less than lease_seconds ({settings.batches.lease_seconds:g}),"
                f" got {settings.batches.lease_renew_seconds:g}",
            )
        rules: dict[str, str] = {}
        for index, rule in enumerate(settings.alerts.rules):
            if rule:
                self._unique(rules, rule.name, f"gateway.alerts.rules[{index}].name")
        self._check_webhook(settings.alerts.webhook, "gateway.alerts.webhook", development=settings.development)
        if settings.pages.public_url and not _ORIGIN.fullmatch(settings.pages.public_url):
            self._mistake(
                "gateway.pages.public_url",
                f"expected http(s)://HOST or http(s)://HOST:PORT, got {settings.pages.public_url[:80]!r}",
            )
        self._check_variable(settings.pages.secret_env, "gateway.pages.secret_env", needed=self.need_upstream_keys)

    def _check_webhook(self, webhook: WebhookSettings, path: str, *, development: bool) -> None:
        if not webhook.url:
            for key in ("addresses", "secret_env"):
                if getattr(webhook, key):
                    self._mistake(f"{path}.{key}", "there is no url that it could belong to")
            return
        # The URL itself is not shown: its path may be what its receiver trusts in.
        if not _WEBHOOK.fullmatch(webhook.url):
            self._mistake(f"{path}.url", "expected http(s)://HOST[:PORT]/PATH without user, fragment and blanks")
        plain = webhook.url.startswith("http://")
        if plain and not webhook.addresses:
            self._mistake(f"{path}.addresses", "addresses are missing: plain http goes to listed addresses only")
        for index, text in enumerate(webhook.addresses):
            try:
                address = read_address(text, development=development)
            except NotApproved as error:
                self._mistake(f"{path}.addresses[{index}]", str(error))
                continue
            if plain and not is_private(address):
                self._mistake(f"{path}.addresses[{index}]", "plain http may go to private addresses only; use https")
        # Connections to an address ask nobody where it is: the host itself is held to the same rules.
        if (host := _ADDRESS_HOST.match(webhook.url)) is not None:
            try:
                read_address(host[1].strip("[]"), development=development)
            except NotApproved as error:
                self._mistake(f"{path}.url", str(error))
        if not webhook.secret_env:
            self._mistake(f"{path}.secret_env", "is missing: messages are signed, so that receivers can trust them")
        self._check_variable(webhook.secret_env, f"{path}.secret_env", needed=self.need_upstream_keys)

    def _check_route(
        self, route: RouteSettings, path: str, places: dict[tuple[str, int], Endpoint], *, development: bool
    ) -> None:
        if route.id.startswith(LOCAL_PREFIX):
            self._mistake(f"{path}.id", f"{LOCAL_PREFIX}... is for bundles that are served without being configured")
        if route.supports_priority and route.kind in ("openai", "local"):
            self._mistake(f"{path}.supports_priority", f"upstreams of kind {route.kind} have no priority")
        if route.kind == "local":
            for key in ("endpoint", "addresses", "api_key_env"):
                if getattr(route, key):
                    self._mistake(f"{path}.{key}", "a local route has none")
            return
        self._check_variable(route.api_key_env, f"{path}.api_key_env", needed=self.need_upstream_keys)
        try:
            endpoint = endpoint_of(route, development=development)
        except NotApproved as error:
            self._mistake(f"{path}.endpoint", str(error))
            return
        other = places.setdefault((endpoint.host, endpoint.port), endpoint)
        if (other.scheme, set(other.addresses)) != (endpoint.scheme, set(endpoint.addresses)):
            self._mistake(
                f"{path}.addresses",
                f"{endpoint.host}:{endpoint.port} has another scheme or other addresses in another route",
            )

    def _check_variable(self, name: str, path: str, *, needed: bool = True) -> None:
        if not name:
            return
        if not _VARIABLE_NAME.fullmatch(name):
            # Not shown: whoever mistook this for the place of the secret itself must not find it in a log.
            self._mistake(path, "expected the name of an environment variable")
        elif needed and not self.environ.get(name):
            self._mistake(path, f"the environment variable {name} is not set")

    def _unique(self, seen: dict[str, str], name: str, path: str) -> None:
        if name in seen:
            self._mistake(path, f"{name!r} is also {seen[name]}")
        seen.setdefault(name, path)


def _scalar(path: str, kind: Any, value: Any, *, text: bool) -> Any:
    """Return ``value`` in the setting's type.

    Raises:
        BadValue: says what was expected.
    """
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise BadValue(f"expected {'|'.join(get_args(kind))}, got {reprlib.repr(value)}")
    try:
        return convert(path, kind, value, text=text)
    except BadValue:
        if kind is Identifier:
            raise BadValue(
                f"expected letters, digits, '.', '_' and '-', at most 128, got {reprlib.repr(value)}"
            ) from None
        raise
