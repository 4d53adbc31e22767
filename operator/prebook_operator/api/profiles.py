"""What the machines offer: GPUs and EFA devices per instance type.

Sources: AWS instance type documentation and the EFA device plugin's list. A profile fixes the node selector, the
number of EFA devices that go with each GPU, and the limits that a role is checked against.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class HardwareProfile(StrEnum):
    """Instance type that the engines run on; `none` is any other machine, without fabric devices (CPU nodes, a
    workstation)."""

    P5EN = "p5en.48xlarge"
    P5 = "p5.48xlarge"
    P5E = "p5e.48xlarge"
    P6_B200 = "p6-b200.48xlarge"
    NONE = "none"


@dataclass(frozen=True)
class Machine:
    """Devices of one node."""

    gpus: int
    efa: int

    @property
    def efa_per_gpu(self) -> int:
        """EFA devices that sit next to each GPU when they are shared out evenly."""
        return self.efa // self.gpus


MACHINES: Final[dict[HardwareProfile, Machine]] = {
    HardwareProfile.P5EN: Machine(gpus=8, efa=16),
    HardwareProfile.P5: Machine(gpus=8, efa=32),
    HardwareProfile.P5E: Machine(gpus=8, efa=32),
    HardwareProfile.P6_B200: Machine(gpus=8, efa=8),
}
"""Profiles with a fabric. `none` has no entry on purpose: it promises nothing."""
