"""The ``ringserve`` command: arguments only; each command is a module of its own, imported when it is run.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration; several commands say more in their help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_USAGE = 2

SERVE_HELP = """\
Runs until SIGTERM, SIGINT or SIGHUP, then drains: frontends stop accepting and finish, then the worker.

exit status:
  0    drained
  1    could not start (ports, run directory), or something had to be cut off while draining
  2    wrong arguments or configuration
  78   a process reported that it cannot start with this configuration
  130  killed by a second SIGINT while draining (143 for SIGTERM)
"""
STATUS_HELP = """\
exit status:
  0  ready
  1  running, but not ready
  2  no node
"""
POLICY_HELP = """\
A weight is a model's relative share of device time under the discipline fair. It holds from the next dispatch on until
the node ends, also when a worker is started again; for good, write it into the node file.

exit status:
  0  shown, or the change is in force
  1  the node refused (unknown model, worker away); nothing was changed
  2  nothing was asked: wrong arguments, or no node runs there
"""
BATCH_HELP = """\
The gateway is --url, else RINGSERVE_BASE_URL, else the node in --run-dir, else http://127.0.0.1:8000/v1. The key is
RINGSERVE_API_KEY, else the node's development key.

exit status:
  0  done; with --wait: every line succeeded
  1  refused, or the batch ended with lines that did not succeed
  2  wrong arguments, or a file that cannot be read or written
"""
SCHEDULING_HELP = """\
The gateway and the key are found as for `ringserve batch`. Reading needs a key of a platform admin or an auditor,
changing one of a platform admin.

exit status:
  0  done
  1  refused; nothing was changed
  2  wrong arguments, or a file that cannot be read
"""
METRICS_HELP = """\
Counters of the present worker since it started; http://HOST:METRICS_PORT/metrics has them over restarts.

exit status:
  0  shown
  1  the node refused (unknown model, worker away)
  2  nothing was asked: wrong arguments, or no node runs there
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="ringserve", description="Model serving: many frontends, shared-memory rings, one worker per device."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    raw = argparse.RawDescriptionHelpFormatter
    serve = commands.add_parser("serve", help="run a node", epilog=SERVE_HELP, formatter_class=raw)
    _add_settings(serve)

    config = commands.add_parser("config", help="print the effective settings and where each came from")
    _add_settings(config)
    config.add_argument("--json", action="store_true", help="print JSON")

    frontend = commands.add_parser("frontend", help="run one more frontend for a running node")
    frontend.add_argument("--attach", required=True, metavar="RUN_DIR", help="run directory of the node")

    status = commands.add_parser(
        "status", help="show a node's processes, channels and models", epilog=STATUS_HELP, formatter_class=raw
    )
    models = commands.add_parser("models", help="show a node's models", epilog=STATUS_HELP, formatter_class=raw)
    policy = commands.add_parser(
        "policy", help="show how a node schedules, or change a model's weight", epilog=POLICY_HELP, formatter_class=raw
    )
    policy.add_argument("--weight", metavar="W", help="the model's new weight, a number above 0")
    metrics = commands.add_parser(
        "metrics", help="show what a node's scheduler has counted", epilog=METRICS_HELP, formatter_class=raw
    )
    for command in (policy, metrics):
        command.add_argument("model", nargs="?", default="", metavar="MODEL", help="only this model")
    for command in (status, models, policy, metrics):
        command.add_argument("--run-dir", metavar="DIR", help="run directory of the node")
        command.add_argument("--json", action="store_true", help="print JSON")

    check = commands.add_parser("check", help="say what a bundle offers, or exactly what is wrong with it")
    check.add_argument("directory", metavar="DIR", help="a bundle, or a repository of bundles")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument(
        "--backend", default="auto", metavar="NAME", help="as runtime.backend; tensorrt says which models do not build"
    )
    built = commands.add_parser("build", help="compile a repository's models for TensorRT ahead of time")
    built.add_argument("directory", metavar="DIR", help="a repository of bundles, or one bundle")
    built.add_argument("--numerics", choices=("auto", "tf32", "f32"), default="auto", help="as runtime.numerics")
    built.add_argument("--gpu", type=int, default=0, metavar="N", help="which GPU to build for (default: 0)")
    built.add_argument("--force", action="store_true", help="build what is there already, too")

    _add_store_commands(commands)
    _add_batch_commands(commands)
    _add_scheduling_commands(commands)

    commands.add_parser("version", help="print the version")
    return parser


def _add_store_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    migrate = commands.add_parser("migrate", help="bring the gateway's database to this program's schema")
    _add_settings(migrate)
    migrate.add_argument(
        "--after", action="store_true", help="also what the previous release must not see; run it when none is left"
    )
    batches = commands.add_parser("batches", help="run batches of the gateway, beside the node's own runner")
    _add_settings(batches)
    keys = commands.add_parser("keys", help="create, list and revoke API keys of the gateway")
    actions = keys.add_subparsers(dest="keys_command", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make a key and print it, once")
    create.add_argument("--workspace", required=True, metavar="NAME", help="name or id; made if there is none")
    create.add_argument("--role", default="member", choices=("member", "workspace_admin", "platform_admin", "auditor"))
    create.add_argument("--name", default="", metavar="TEXT", help="what the key is for")
    listed = actions.add_parser("list", help="show keys, never their secrets")
    listed.add_argument("--workspace", metavar="NAME", help="only this workspace's")
    revoke = actions.add_parser("revoke", help="refuse a key from now on")
    revoke.add_argument("key_id", metavar="KEY_ID")
    for action in (create, listed, revoke):
        _add_settings(action)
        action.add_argument("--json", action="store_true", help="print JSON")


def _add_batch_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    batch = commands.add_parser(
        "batch", help="send files of requests to a gateway", epilog=BATCH_HELP, formatter_class=raw
    )
    actions = batch.add_subparsers(dest="batch_command", required=True, metavar="ACTION")
    submit = actions.add_parser("submit", help="upload a JSONL file and run its lines")
    submit.add_argument("file", metavar="FILE")
    submit.add_argument("--wait", action="store_true", help="until the batch has ended, with progress")
    submit.add_argument("--endpoint", metavar="PATH", help="default: the url of the first line")
    submit.add_argument("--window", default="24h", choices=("24h", "48h", "72h", "168h"), help="default 24h")
    submit.add_argument("--metadata", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    submit.add_argument("--idempotency-key", metavar="KEY", help="the same key within 24 h makes no second batch")
    listed = actions.add_parser("list", help="show batches, newest first")
    listed.add_argument("--limit", type=int, default=20, metavar="N", help="default 20")
    show = actions.add_parser("show", help="show one batch")
    cancel = actions.add_parser("cancel", help="stop a batch; lines that run are finished and kept")
    results = actions.add_parser("results", help="print the answers of a batch as JSONL")
    results.add_argument("--errors", action="store_true", help="the lines that failed or never ran instead")
    results.add_argument("-o", "--output", metavar="FILE", help="write there instead, all or nothing")
    for action in (show, cancel, results):
        action.add_argument("batch", metavar="BATCH")
    for action in (submit, listed, show, cancel, results):
        action.add_argument("--url", metavar="URL", help="of the gateway, ending in /v1")
        action.add_argument("--run-dir", metavar="DIR", help="run directory of a node on this machine")
    for action in (submit, listed, show, cancel):
        action.add_argument("--json", action="store_true", help="print JSON")


def _add_scheduling_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(
        "batch-scheduling", help="when a route runs lines of batches", epilog=SCHEDULING_HELP, formatter_class=raw
    )
    actions = command.add_subparsers(dest="scheduling_command", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="show every route")
    get = actions.add_parser("get", help="show settings and status of a route")
    put = actions.add_parser("set", help="replace all settings of a route; what the file leaves out is off")
    for action in (get, put):
        action.add_argument("route", metavar="ROUTE", help="its id in the node file")
    put.add_argument("file", metavar="FILE", help="JSON, as `get --json` shows it under settings; - for standard input")
    put.add_argument("--preview", action="store_true", help="only say what they would mean")
    for action in (listed, get, put):
        action.add_argument("--url", metavar="URL", help="of the gateway, ending in /v1")
        action.add_argument("--run-dir", metavar="DIR", help="run directory of a node on this machine")
        action.add_argument("--json", action="store_true", help="print JSON")


FLAGS = {
    "--models": ("model_repo", "DIR", "model repository (default ./models)"),
    "--frontends": ("frontends", "N", "number of frontend processes, or auto"),
    "--run-dir": ("run_dir", "DIR", "sockets and state (default under XDG_STATE_HOME)"),
    "--host": ("global.endpoints.host", "H", "address to listen on (default 127.0.0.1)"),
    "--http-port": ("global.endpoints.http_port", "P", "default 8000; 0 picks a free one"),
    "--grpc-port": ("global.endpoints.grpc_port", "P", "default 8001; 0 picks a free one"),
    "--metrics-port": ("global.endpoints.metrics_port", "P", "default 8002; 0 picks a free one"),
    "--discipline": ("global.scheduler.discipline", "NAME", "fair, fifo or edf"),
}
"""Options of ``serve`` and ``config`` that override a setting, by the setting's path."""
SWITCHES = {
    "--development": ("gateway.development", "the OpenAI-compatible gateway with one workspace and one printed key"),
}
"""The same for what is simply on."""


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node", metavar="FILE", help="node file (YAML)")
    for flag, (path, metavar, text) in FLAGS.items():
        parser.add_argument(flag, dest=path, metavar=metavar, help=text)
    for flag, (path, text) in SWITCHES.items():
        parser.add_argument(flag, dest=path, action="store_const", const="true", help=text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        return _run(arguments)
    except BrokenPipeError:
        # The reader of our output left early, as `head` does.
        sys.stderr.close()
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "serve":
            from frontend.commands import serve

            return serve.serve(arguments)
        case "config":
            from frontend.commands import settings

            return settings.show(arguments)
        case "frontend":
            from frontend.commands import join

            return join.join(arguments.attach)
        case "migrate":
            from frontend.commands import store

            return store.migrate(arguments)
        case "batches":
            from frontend.commands import batches

            return batches.run_batches(arguments)
        case "keys":
            from frontend.commands import store

            return store.keys(arguments)
        case "status" | "models":
            from frontend.commands import status

            return status.show(arguments.command, arguments.run_dir, as_json=arguments.json)
        case "policy" | "metrics":
            from frontend.commands import policy

            weight = arguments.weight if arguments.command == "policy" else None
            return policy.run(arguments.command, arguments.run_dir, arguments.model, weight, as_json=arguments.json)
        case "batch":
            from frontend.commands import batch

            return batch.run(arguments)
        case "batch-scheduling":
            from frontend.commands import scheduling

            return scheduling.run(arguments)
        case "check":
            from frontend.commands import check

            return check.check(arguments.directory, as_json=arguments.json, backend=arguments.backend)
        case "build":
            from frontend.commands import build

            return build.build(
                arguments.directory, numerics=arguments.numerics, gpu=arguments.gpu, force=arguments.force
            )
        case _:
            from frontend.version import hot_path, own_version

            print(f"ringserve {own_version()} (hot path {hot_path()})")
            return 0


if __name__ == "__main__":
    sys.exit(main())
