"""Plain bytes over the link: whether it really has its rate, and what sending them costs prefill's cores."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
#: Each line tells the sender how much to send. Like a transfer it sends every byte from a place of its own: what a
#: socket takes out of a cache costs less than what comes from memory.
_TAKE: Final = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
peer, _ = listener.accept()
buffer = bytearray(1 << 18)
total = 0
while size := peer.recv_into(buffer):
    total += size
print(total)
"""
_GIVE: Final = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
everything = memoryview(b"x" * int(sys.argv[3]))
print("connected", flush=True)
sent = ended = 0
for line in sys.stdin:
    peer.sendall(everything[sent : sent + int(line)])
    sent += int(line)
    ended = time.monotonic()
print(ended)
"""


@contextlib.contextmanager
def sending(rig: Rig, *, total: int) -> Iterator[Callable[[int], None]]:
    """Yields what has so many bytes, of `total`, sent from prefill's place, on its cores, to decode's: a plain socket.

    Raises RigError when they cannot be sent, or were not all sent when the body was done.
    """
    where = [rig.decode.address, str(_PORT)]
    asked: list[int] = []
    with contextlib.ExitStack() as stack:
        taker = stack.enter_context(_plain(rig.decode.prefix, rig.decode.cores, _TAKE, where))
        _expect(taker, "listening")
        giver = stack.enter_context(_plain(rig.prefill.prefix, rig.prefill.cores, _GIVE, [*where, str(total)]))
        _expect(giver, "connected")

        def send(size: int) -> None:
            assert giver.stdin is not None
            try:
                giver.stdin.write(f"{size}\n")
                giver.stdin.flush()
            except BrokenPipeError as error:
                raise RigError("the sender of the bytes beside the prompts has ended early") from error
            asked.append(size)

        yield send
        done = time.monotonic()
        try:
            ended, _ = giver.communicate(timeout=30)
            arrived, _ = taker.communicate(timeout=30)
        except subprocess.TimeoutExpired as error:
            raise RigError(f"{sum(asked)} bytes beside the prompts were not sent even 30 s after them") from error
        if arrived.strip() != str(sum(asked)):
            raise RigError(f"of {sum(asked)} bytes beside the prompts only {arrived.strip() or 'some'} arrived")
        if float(ended) > done:
            raise RigError("the prompts were computed before the bytes beside them were sent: use longer prompts")


@contextlib.contextmanager
def _plain(
    prefix: tuple[str, ...], cores: tuple[int, ...], code: str, arguments: list[str]
) -> Iterator[subprocess.Popen[str]]:
    pinned = ["taskset", "-c", ",".join(map(str, cores))]
    process = subprocess.Popen(
        [*prefix, *pinned, sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _expect(process: subprocess.Popen[str], word: str) -> None:
    if process.stdout is None or process.stdout.readline().strip() != word:
        raise RigError(f"a plain socket between prefill's place and decode's failed before it was {word}")


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
