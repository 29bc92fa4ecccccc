"""What ``ringserve batch show`` says beyond the batch itself: why it waits, its place, when it is expected to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from frontend.commands.gateway_client import CallFailed, GatewayClient
from frontend.platform.words import QUEUED, is_fault, reason_text


def waiting_page(client: GatewayClient, batch_id: str) -> dict[str, Any] | None:
    """Return the management API's page of a batch, None from a gateway that has none for this key."""
    try:
        workspace = client.manage("/me")["workspace_id"]
        return client.manage(f"/workspaces/{workspace}/batches/{batch_id}")
    except CallFailed:
        return None


def page_lines(page: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for people; nothing for a batch that has ended."""
    batch = page["batch"]
    if batch["ended_at"] is not None:
        return
    if batch["waiting_reason"] is not None:
        yield f"waiting  {QUEUED}: {reason_text(batch['waiting_reason'])}"
    for lane in page["scheduling"]:
        yield f"on       {lane['model']}: {_lane(lane)}"
    outlook = batch["outlook"]
    if outlook is not None:
        yield f"outlook  {_outlook(outlook)}"


def _lane(lane: Mapping[str, Any]) -> str:
    reason = lane["reason"]
    parts = ["Starting lines" if reason is None else str(reason_text(reason))]
    if is_fault(reason):
        parts[0] += " (a fault: somebody should look at it)"
    if lane["queue"] > 1 and lane["position"] is not None:
        parts.append(f"#{lane['position']} of {lane['queue']} in queue")
    parts += [f"{lane['waiting_lines']} waiting", f"{lane['running_lines']} running"]
    if lane["since"] is not None:
        parts.append(f"since {_time(lane['since'])}")
    return ", ".join(parts)


def _outlook(outlook: Mapping[str, Any]) -> str:
    likely, late = outlook["eta_p50"], outlook["eta_p90"]
    if likely is None and outlook["measured_lines"] == 0:
        return "nothing measured yet"
    parts = ["no end in sight" if likely is None else f"ends about {_time(likely)}"]
    if late is not None:
        parts.append(f"in 9 of 10 cases by {_time(late)}")
    if outlook["at_risk"]:
        parts.append("AT RISK: its window may end before")
        suggested = outlook["suggested_completion_window"]
        parts.append(f"a window of {suggested} would do" if suggested else "no window would do")
    return ", ".join(parts)


def _time(text: str) -> str:
    """Return an API's time as the rest of the command shows times."""
    return text.replace("T", " ")
