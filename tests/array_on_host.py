"""The array engine on a host device of its own, for suites that run over several engines."""

from __future__ import annotations

from engines.array.on_device import DeviceArrayEngine
from engines.device.host import HostDevice
from engines.device.shared import SharedDevice

ARENA_BYTES = 40 * 1024 * 1024


class HostDeviceArrayEngine(DeviceArrayEngine):
    """Tells when it is closed what was done wrong or left behind, also what something in between had swallowed."""

    def __init__(self, device: HostDevice | None = None, arena_bytes: int = ARENA_BYTES) -> None:
        self.device = device or HostDevice()
        self.shared = SharedDevice(self.device, arena_bytes)
        self.shared.start()
        super().__init__(self.shared)

    def close(self) -> None:
        super().close()
        self.shared.close()
        self.device.close()
