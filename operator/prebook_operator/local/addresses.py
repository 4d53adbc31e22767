"""One loopback address per pod, so that every pod can listen on port 8000.

All of 127.0.0.0/8 is the machine's own on Linux. An address is claimed by binding an abstract Unix socket that
carries its name: no file to clean up, and the kernel releases the claim when the runner ends, however it ends.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prebook_operator.local.errors import MachineError


@dataclass
class PodAddress:
    """A claimed address; ``release`` gives it back."""

    ip: str
    _claim: socket.socket

    def release(self) -> None:
        """Gives the address back; may be called twice."""
        self._claim.close()


def candidates() -> Iterator[str]:
    """127.0.0.2 … 127.0.15.254, in order."""
    for third in range(16):
        for fourth in range(2 if third == 0 else 1, 255):
            yield f"127.0.{third}.{fourth}"


def claim_address(*, ports: Iterable[int]) -> PodAddress:
    """Claims the first address that no other runner holds and on which none of ``ports`` is taken.

    Raises ``MachineError`` on systems without a whole loopback network, and when all addresses are taken.
    """
    if sys.platform != "linux":
        raise MachineError(
            "the local runner needs Linux: it gives each pod an address of 127.0.0.0/8",
            remedy="use a Linux machine or VM",
        )
    wanted = tuple(ports)
    for ip in candidates():
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0prebook-pod-{ip}")
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise
        if all(port_is_free(ip, port) for port in wanted):
            return PodAddress(ip=ip, _claim=claim)
        claim.close()
    raise MachineError("no free loopback address", remedy="`prebook ps` shows what runs; `prebook down NAME` ends it")


def port_is_free(ip: str, port: int) -> bool:
    """Whether a server could listen on ``ip:port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL}:
                return False
            raise
    return True
