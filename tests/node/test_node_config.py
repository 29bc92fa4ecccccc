"""Node file, environment and command line: every mistake named with its path, every value with its source."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cpus import available_cpus
from frontend import config, options
from frontend.config import ConfigError, Flag, Loaded
from frontend.node.cpus import MAX_AUTO_FRONTENDS, auto_frontends, auto_frontends_here


def load(
    tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, flags: dict[str, Flag] | None = None
) -> Loaded:
    (tmp_path / "models").mkdir(exist_ok=True)
    node_file = tmp_path / "node.yaml"
    node_file.write_text(text)
    return config.load(node_file, {"HOME": "/h", **(environ or {})}, flags or {}, lambda: 3, need_models=True)


def mistakes(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, environ)
    return [line.replace(str(tmp_path), "DIR") for line in caught.value.mistakes]


PAGE = {
    "model_control_mode": "dynamic",
    "model_poll_seconds": 15.0,
    "runtime": {
        "backend": "auto", "weight_cache_fraction": 1.0, "weight_cache_wiggle_fraction": 0.1, "numerics": "auto",
    },
    "scheduler": {
        "discipline": "fair", "ema_halflife_seconds": 30.0, "recency_penalty_cap": 0.25, "coalescing_discount": 0.10,
        "cost_ema_alpha": 0.2, "max_queue_depth": 1024, "dispatch_timeout_seconds": 30.0, "compaction_interval": 0,
    },
    "endpoints": {
        "host": "127.0.0.1", "http_port": 8000, "grpc_port": 8001, "metrics_port": 8002, "max_request_bytes": 67108864,
    },
}  # fmt: skip
"""Keys and defaults as the node file's page and the scheduling page give them."""


def test_rule_33_defaults_are_the_pages_and_an_empty_file_is_enough(tmp_path: Path) -> None:
    settings = load(tmp_path).settings
    assert settings.frontends == 3
    assert settings.gpus == ()
    assert settings.workers == ("worker0",)
    assert settings.run_dir == "/h/.local/state/ringserve"
    assert settings.model_repo == str(tmp_path / "models")
    for key, value in PAGE.items():
        if isinstance(value, dict):
            section = getattr(settings, key)
            assert {name: getattr(section, name) for name in value} == value
        else:
            assert getattr(settings, key) == value


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


BAD = [
    ("global: {scheduler: {discipline: fairr}}", "global.scheduler.discipline: expected fair|fifo|edf, got 'fairr'"),
    ("global: {scheduler: {disipline: fair}}", "global.scheduler.disipline: unknown key; did you mean discipline?"),
    ("global: {scheduler: {max_queue_depth: 0}}",
     "global.scheduler.max_queue_depth: expected a whole number of at least 1, got 0"),
    ("global: {scheduler: {max_queue_depth: true}}",
     "global.scheduler.max_queue_depth: expected a whole number of at least 1, got True"),
    ("global: {scheduler: {recency_penalty_cap: 1.5}}",
     "global.scheduler.recency_penalty_cap: expected a number from 0 to 1, got 1.5"),
    ("global: {scheduler: {ema_halflife_seconds: .inf}}",
     "global.scheduler.ema_halflife_seconds: expected a number above 0, got inf"),
    ("global: {scheduler: {ema_halflife_seconds: .nan}}",
     "global.scheduler.ema_halflife_seconds: expected a number above 0, got nan"),
    ("global: {scheduler: {dispatch_timeout_seconds: 1.0e+12}}",
     "global.scheduler.dispatch_timeout_seconds: expected at most 2.6784e+06, got 1000000000000.0"),
    ("global: {scheduler: {models: {resnet50: {weight: -1}}}}",
     "global.scheduler.models.resnet50.weight: expected a number above 0, got -1"),
    ("global: {scheduler: {models: {resnet50: {wieght: 2}}}}",
     "global.scheduler.models.resnet50.wieght: unknown key; did you mean weight?"),
    ("global: {scheduler: {models: {resnet50: {residency: pinned}}}}",
     "global.scheduler.models.resnet50.residency: not available yet"),
    ("global: {scheduler: {models: [a]}}", "global.scheduler.models: expected a mapping, got ['a']"),
    ("global: {endpoints: {http_port: 70000}}",
     "global.endpoints.http_port: expected a whole number from 0 to 65535, got 70000"),
    ("global: {endpoints: {http_port: '8000'}}",
     "global.endpoints.http_port: expected a whole number from 0 to 65535, got '8000'"),
    ("global: {endpoints: {grpc_port: 8000}}",
     "global.endpoints.grpc_port: 8000 is also global.endpoints.http_port; two servers cannot share a port"),
    ("global: {model_control_mode: explicit}",
     "global.model_control_mode: 'explicit': loading and unloading by request is not available yet"),
    ("global: {runtime: {backend: gpu}}",
     "global.runtime.backend: expected auto|cpu|cuda|onnxruntime|array|tensorrt, got 'gpu'"),
    ("gpus: 0\nglobal: {runtime: {backend: cuda}}",
     "gpus: 0 means the CPU, but global.runtime.backend is cuda; write auto or [0]"),
    ("global: []", "global: expected a mapping, got []"),
    ("gpus: 2", "gpus: 2: a worker uses one GPU, and more than 1 worker is not available yet; write [0]"),
    ("gpus: [1, 3]", "gpus: [1, 3]: a worker uses one GPU, and more than 1 worker is not available yet; write [0]"),
    ("gpus: -1", "gpus: expected auto, a count or a list of device numbers, got -1"),
    ("gpus: [true]", "gpus: expected auto, a count or a list of device numbers, got [True]"),
    ("gpus: all", "gpus: expected auto, a count or a list of device numbers, got 'all'"),
    ("frontends: 0", "frontends: auto, or expected a whole number of at least 1, got 0"),
    ("frontends: 33", "frontends: 33 is above global.channel.max_channels (32)"),
    ("model_repo: nowhere", "model_repo: DIR/nowhere does not exist; give --models DIR (from file DIR/node.yaml)"),
    ("model_repo: node.yaml",
     "model_repo: DIR/node.yaml is not a directory; give --models DIR (from file DIR/node.yaml)"),
    ("modelrepo: x", "modelrepo: unknown key; did you mean model_repo?"),
    ("zzz: 1", "zzz: unknown key; known: model_repo, run_dir, frontends, gpus, global, workers, models, gateway"),
    ("gateway: {routes: []}",
     "gateway.routes: unknown key; known: enabled, development, state_dir, store, store_password_env, max_body_bytes,"
     " allow_client_priority, models, files, batches, alerts, pages"),
    ("workers: [{name: worker0}, {name: worker1}]", "workers: 2 workers: more than 1 is not available yet"),
    ("workers: [{nam: a}]", "workers[0].nam: unknown key; did you mean name?"),
    ("workers: [{name: ../up}]", "workers[0].name: expected a name such as worker0, got '../up'"),
    ("models: {a: [worker7]}", "models.a: no worker 'worker7'; workers: worker0"),
    ("models: {a: worker0}", "models.a: expected a list of workers, got 'worker0'"),
    ("a: 1\na: 2", "DIR/node.yaml, line 2, column 1: key 'a' is given twice"),
    ("global:\n  endpoints: {host: a, host: b}", "DIR/node.yaml, line 2, column 24: key 'host' is given twice"),
    ("- 1", "DIR/node.yaml: expected a mapping such as 'model_repo: ./models', got list"),
    ("{", "DIR/node.yaml, line 1, column 2: expected the node content, but found '<stream end>'"),
    ("a: !!python/object/apply:os.getcwd []",
     "DIR/node.yaml, line 1, column 4: could not determine a constructor for the tag"
     " 'tag:yaml.org,2002:python/object/apply:os.getcwd'"),
    ("x: '" + "y" * (1 << 20) + "'", "DIR/node.yaml: larger than 1048576 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gpus", "backend"),
    [
        ("gpus: auto", (), "auto"),
        ("gpus: 0", (), "cpu"),
        ("gpus: []", (), "cpu"),
        ("gpus: 0\nglobal: {runtime: {backend: array}}", (), "array"),
        ("gpus: 1", (0,), "auto"),
        ("gpus: [2]\nglobal: {runtime: {backend: cuda}}", (2,), "cuda"),
    ],
)
def test_gpus_are_auto_a_count_or_a_list_and_0_is_the_cpu(
    tmp_path: Path, text: str, gpus: tuple[int, ...], backend: str
) -> None:
    settings = load(tmp_path, text).settings
    assert (settings.gpus, settings.runtime.backend) == (gpus, backend)


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[text[:40] for text, _ in BAD])
def test_a_mistake_is_named_with_its_path(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in mistakes(tmp_path, text)


def test_rule_33_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    text = "global: {scheduler: {discipline: lifo, max_queue_depth: -1}, endpoints: {prot: 1}}\ngpus: 2"
    environ = {"INFERENCE_SERVER_SCHEDULER_COST_EMA_ALPHA": "0", "INFERENCE_SERVER_SCHEDULER_DISCIPLIN": "fifo"}
    paths = [line.split(":")[0] for line in mistakes(tmp_path, text, environ)]
    assert sorted(paths) == [
        "INFERENCE_SERVER_SCHEDULER_DISCIPLIN",
        "global.endpoints.prot",
        "global.scheduler.cost_ema_alpha",
        "global.scheduler.discipline",
        "global.scheduler.max_queue_depth",
        "gpus",
    ]


def test_precedence_and_sources(tmp_path: Path) -> None:
    path, variable = "global.scheduler.discipline", "INFERENCE_SERVER_SCHEDULER_DISCIPLINE"
    text = "global: {scheduler: {discipline: edf}}"
    file = f"file {tmp_path / 'node.yaml'}"
    flag = {path: Flag("--discipline", "fair")}
    cases = [
        (load(tmp_path), "fair", "default"),
        (load(tmp_path, text), "edf", file),
        (load(tmp_path, text, {variable: "fifo"}), "fifo", f"environment {variable}"),
        (load(tmp_path, text, {variable: "fifo"}, flag), "fair", "command line --discipline"),
    ]
    assert [(loaded.settings.scheduler.discipline, loaded.sources[path]) for loaded, _, _ in cases] == [
        (value, source) for _, value, source in cases
    ]


def test_a_mistake_in_an_overridden_source_is_reported(tmp_path: Path) -> None:
    text = "global: {scheduler: {discipline: lifo}}"
    assert mistakes(tmp_path, text, {"INFERENCE_SERVER_SCHEDULER_DISCIPLINE": "fifo"}) == [
        "global.scheduler.discipline: expected fair|fifo|edf, got 'lifo'"
    ]


def test_unknown_variable_gets_a_suggestion(tmp_path: Path) -> None:
    assert mistakes(tmp_path, "", {"INFERENCE_SERVER_ENDPOINTS_HTTPPORT": "1"}) == [
        "INFERENCE_SERVER_ENDPOINTS_HTTPPORT: unknown environment variable;"
        " did you mean INFERENCE_SERVER_ENDPOINTS_HTTP_PORT?"
    ]


@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.path)
def test_every_scalar_has_a_variable_that_takes_its_default(tmp_path: Path, option: options.Option) -> None:
    loaded = load(tmp_path, "", {option.environment: str(option.default)})
    assert loaded.sources[option.path] == f"environment {option.environment}"
    holder = attrgetter(option.section)(loaded.settings) if option.section else loaded.settings
    assert getattr(holder, option.key) == option.default


@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.path)
@given(value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.none())))
def test_any_value_is_taken_or_refused_with_what_was_expected(option: options.Option, value: object) -> None:
    outcome: object
    try:
        outcome = options.convert(option.path, option.kind, value, text=False)
    except options.BadValue as error:
        outcome = error
    if isinstance(outcome, options.BadValue):
        assert str(outcome).startswith(("expected ", repr(value)[:1]))
    else:
        assert isinstance(outcome, type(option.default))
        assert outcome == value


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    settings = load(tmp_path, "model_repo: ./models\nrun_dir: state").settings
    assert settings.model_repo == str(tmp_path / "models")
    assert settings.run_dir == str(tmp_path / "state")


def test_per_model_overrides_and_pins(tmp_path: Path) -> None:
    text = "global: {scheduler: {models: {resnet50: {weight: 2, max_batch_size: 8}}}}\nmodels: {resnet50: [worker0]}"
    loaded = load(tmp_path, text)
    override = loaded.settings.scheduler.models["resnet50"]
    assert (override.weight, override.max_batch_size) == (2.0, 8)
    assert loaded.settings.pins == {"resnet50": ("worker0",)}
    assert loaded.sources["global.scheduler.models.resnet50.weight"].startswith("file ")


def test_default_mode_says_that_models_load_once(tmp_path: Path) -> None:
    assert [notice.split(":")[0] for notice in load(tmp_path).settings.notices] == ["model_control_mode dynamic"]
    assert load(tmp_path, "global: {model_control_mode: static}").settings.notices == ()


def test_xdg_state_home_is_used_only_when_absolute() -> None:
    assert config.default_run_dir({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == "/s/ringserve"
    assert config.default_run_dir({"HOME": "/h", "XDG_STATE_HOME": "s"}) == "/h/.local/state/ringserve"


def test_mo_06_frontends_follow_the_cpus_this_node_may_use() -> None:
    assert [auto_frontends(cpus) for cpus in (1, 2, 3, 5, 64)] == [1, 1, 2, 4, MAX_AUTO_FRONTENDS]
    assert auto_frontends_here() == auto_frontends(available_cpus())
