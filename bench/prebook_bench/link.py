"""Checks that the shaped link really has its rate: bytes from prefill's namespace to decode's for about a second."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from prebook_bench.rig import Rig, RigError

_PORT: Final = 5999
#: Both halves print nothing but the result. The first 20 % are not counted: the bucket is full when sending starts.
_RECEIVE: Final = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
listener.settimeout(10)
peer, _ = listener.accept()
start = None
total = 0
skip = float(sys.argv[3]) * 0.2
first = time.monotonic()
while data := peer.recv(1 << 18):
    now = time.monotonic()
    if now - first < skip:
        continue
    if start is None:
        start = now
    else:
        total += len(data)
        last = now
print(total * 8 / (last - start))
"""
_SEND: Final = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
end = time.monotonic() + float(sys.argv[3])
block = bytes(1 << 16)
while time.monotonic() < end:
    peer.sendall(block)
"""


def measure_bits_per_second(rig: Rig, *, seconds: float = 1.5) -> float:
    """TCP throughput from prefill's place to decode's, in bits per second. Raises RigError when it cannot be had."""
    arguments = [rig.decode.address, str(_PORT), str(seconds)]
    receiver = subprocess.Popen(
        [*rig.decode.prefix, sys.executable, "-c", _RECEIVE, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        if receiver.stdout is None or receiver.stdout.readline().strip() != "listening":
            raise RigError("the link check could not listen in decode's namespace")
        sender = [*rig.prefill.prefix, sys.executable, "-c", _SEND, *arguments]
        sent = subprocess.run(sender, capture_output=True, text=True, timeout=seconds + 30, check=False)
        if sent.returncode != 0:
            raise RigError(f"prefill's namespace cannot reach decode's: {sent.stderr.strip().splitlines()[-1:]}")
        output, _ = receiver.communicate(timeout=seconds + 30)
    finally:
        if receiver.poll() is None:
            receiver.kill()
            receiver.wait()
    try:
        return float(output.strip())
    except ValueError as error:
        raise RigError(f"the link check got no figure: {output[:200]!r}") from error
