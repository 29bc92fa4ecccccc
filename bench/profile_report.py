"""The result of bench/profile.py as Markdown. Pure."""

from __future__ import annotations

from typing import Any

WAY_TITLES = {"repeat": "a request that repeats", "ordinary": "a request that does not"}


def text_of(result: dict[str, Any]) -> str:
    """Render what was measured; parts that were not are left out."""
    lines: list[str] = []
    for name, way in result.get("timeline", {}).items():
        lines += _way(result["model"], name, way)
    for run in result.get("under_load", []):
        lines += ["", *(_recorded if "per_s_recorded" in run else _sampled)(result["model"], run)]
    return "\n".join(lines).strip("\n")


def _way(model: str, name: str, way: dict[str, Any]) -> list[str]:
    compiled_us = way.get("client_compiled_p50_us")
    compiled = f"compiled {compiled_us:.0f} us, " if compiled_us else ""
    lines = [
        f"**{model}, one caller, HTTP binary, {WAY_TITLES[name]}**: {way['requests']} requests; client p50 {compiled}"
        f"interpreted {way['client_untraced_p50_us']:.0f} us ({way['client_p50_us']:.0f} us while tracing), of which "
        f"{way['server_p50_us']:.0f} us lie between the first and the last milestone.",
        "", "| stage | p50 us | p90 us |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {row['stage']} | {row['p50_us']} | {row['p90_us']} |" for row in way["stages"]]
    outside = way["client_p50_us"] - way["server_p50_us"]
    lines += [f"| client, kernel, event loops before and after | {outside:.1f} | |", ""]
    return lines + [f"- milestone not passed: {place}" for place in way["missing"]]


def _sampled(model: str, run: dict[str, Any]) -> list[str]:
    lines = [
        f"**{model}, {run['concurrency']} callers, {run['format']}, interpreted**: {run['per_s']:.0f}/s "
        f"({run['per_s_sampled']:.0f}/s while sampling), {run['errors']} errors"
    ]
    for role, row in run["roles"].items():
        lines += [
            "",
            f"{role}: {row['cpu_us_unsampled']} us of processor a request; while sampling {row['cpu_us']} us, of "
            f"them {row['user_us']} user and {row['system_us']} kernel; {row['samples']} samples",
            "", "| stage | us |", "|---|---|",
        ]  # fmt: skip
        lines += [f"| {name} | {used_us} |" for name, used_us in row["stages_us"].items()]
        lines += ["", f"Own time of functions, us: {_costly(row)}"]
    return lines


def _recorded(model: str, run: dict[str, Any]) -> list[str]:
    server_us = sum(row["cpu_us"] for row in run["roles"].values())
    lines = [
        f"**{model}, {run['concurrency']} callers, {run['format']}, compiled**: {run['per_s']:.0f}/s "
        f"({run['per_s_recorded']:.0f}/s while recording), {run['errors']} errors; {server_us:.1f} us of the server's "
        f"and {run['client_us']:.1f} us of the client's processor time a request. Cores: server {run['server_cores']}, "
        f"client {run['client_cores']}, others {run['other_cores']}."
    ]
    for role, row in run["roles"].items():
        several = f" ({row['processes']} processes)" if row["processes"] > 1 else ""
        rows = {name: used_us for name, used_us in row["stages_us"].items() if used_us >= row["cpu_us"] / 200}
        rest_us = sum(row["stages_us"].values()) - sum(rows.values())
        lines += ["", f"| {role}{several} | us |", "|---|---|"]
        lines += [f"| {name} | {used_us:.2f} |" for name, used_us in rows.items()]
        if len(rows) < len(row["stages_us"]):
            lines += [f"| {len(row['stages_us']) - len(rows)} smaller ones | {rest_us:.2f} |"]
        lines += [
            f"| charged: {row['user_us']:.2f} user, {row['system_us']:.2f} system | {row['cpu_us']:.2f} |",
            "",
            f"{row['samples']} samples, which are {row['seen']:.0%} of those to expect from the "
            f"{row['cpu_us_recorded']} us charged while recording. With what they call: {_costly(row)}",
        ]
    return lines


def _costly(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {used_us}" for name, used_us in row["functions_us"].items())
