"""Settings of one batch runner process: frozen values, parsed once by the node and handed over as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from frontend.gateway_settings import GatewaySettings
from frontend.settings import Count, EndpointSettings, FrontendSettings, SystemSharedMemorySettings
from worker.config import ChannelSettings, Positive

if TYPE_CHECKING:
    from frontend.config import NodeSettings


class BatchesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All a batch runner is told.

    Attributes:
        worker_sockets: Unix socket of every worker for ``local`` routes; empty on a machine without one.
        endpoints: limits of requests to our own worker; nothing is listened on.
        dispatch_timeout_seconds: of a request to our own worker that brings no deadline.
    """

    name: str
    run_dir: str
    gateway: GatewaySettings
    worker_sockets: tuple[str, ...] = ()
    endpoints: EndpointSettings = EndpointSettings()
    channel: ChannelSettings = ChannelSettings()
    dispatch_timeout_seconds: Positive = 30.0
    hook_threads: Count = 8

    def frontend(self) -> FrontendSettings:
        """Return the settings of the part that talks to our own worker: a frontend that nobody can reach."""
        return FrontendSettings(
            name=self.name,
            run_dir=self.run_dir,
            worker_sockets=self.worker_sockets,
            # A line runs long after it was sent: no client's memory is its own.
            endpoints=msgspec.structs.replace(self.endpoints, system_shared_memory=SystemSharedMemorySettings()),
            channel=self.channel,
            dispatch_timeout_seconds=self.dispatch_timeout_seconds,
            hook_threads=self.hook_threads,
        )


def batches_settings(node: NodeSettings, name: str, run_dir: str, worker_sockets: tuple[str, ...]) -> BatchesSettings:
    """Return what one batch runner of a node is told."""
    return BatchesSettings(
        name=name,
        run_dir=run_dir,
        gateway=node.gateway,
        worker_sockets=worker_sockets,
        endpoints=node.endpoints,
        channel=node.channel,
        dispatch_timeout_seconds=node.scheduler.dispatch_timeout_seconds,
    )
