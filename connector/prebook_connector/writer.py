"""The WRITEs of prefill's transfers: posting what may leave, polling what is under way, and how fast the link takes it.

Runs on the transfer thread, free of vLLM and NIXL (see ``ports``). What a transfer is, and when it ends, is decided in
``push_side``.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

from prebook_connector.layers import next_part
from prebook_connector.ledger import Ledger, Range
from prebook_connector.peers import PeerTable
from prebook_connector.ports import SOONEST, Groups, Link, LinkError, Recorder
from prebook_connector.protocol import Progress, encode
from prebook_connector.push import OpenWrite, Push, PushSettings, Rest
from prebook_connector.timeline import Timeline
from prebook_connector.turns import Room

SEND_BUFFER_BYTES = 2 * 1024 * 1024
"""What a socket takes at once. UCX hands a WRITE over TCP to the kernel piece by piece, whenever it is polled."""
FIRST_RATE = 1e9
"""Bytes per second, until a WRITE that does not fit into a buffer has told better."""
SLICE_BYTES = 512 * 1024
"""What is worth a WRITE of its own while the last chunk is computed layer by layer (or ``min_bytes``, if less)."""
TURN_SECONDS = 0.1
"""What a WRITE may take of the link, at the rate of late, before another transfer may go; ``min_bytes``, if more."""


class Writer:
    """Moves the blocks of every transfer of this prefill rank."""

    def __init__(
        self,
        *,
        link: Link,
        peers: PeerTable,
        settings: PushSettings,
        recorder: Recorder,
        timeline: Timeline,
        checksum: Callable[[Sequence[int]], int] | None,
    ) -> None:
        self._link = link
        self._peers = peers
        self._settings = settings
        self._recorder = recorder
        self._timeline = timeline
        self._checksum = checksum
        self._rate = FIRST_RATE  # bytes per second that WRITEs have moved lately
        self._measured = False  # whether a WRITE has told
        self._free_at: dict[str, float] = {}  # when the link to an engine will have moved all WRITEs, at that rate

    @property
    def stride(self) -> float:
        """Seconds between two looks that keep the link busy."""
        return SEND_BUFFER_BYTES / self._rate

    def poll(self, push: Push, now: float) -> bool:
        """Looks at the open WRITEs and lets go of those that have ended; True when one of them has failed."""
        failed = False
        for write in list(push.writes):
            still_open = []
            for handle in write.handles:
                state = self._link.poll(handle)
                write.failed = write.failed or state == "failed"
                # A WRITE to an engine that is gone may never end by itself: releasing it makes the transport abort it.
                ended = state != "open" or push.severed
                if not ended or not self._link.release(handle):
                    still_open.append(handle)
            write.handles = still_open
            if still_open:
                continue
            push.writes.remove(write)
            assert push.ledger is not None
            if write.rest is None:
                push.ledger.finish_write(write.range, epoch=write.epoch)
            else:
                write.rest.open -= 1
                self.close_rest(push, write.rest, failed=write.failed)
            if write.failed:
                failed = True
            elif write.epoch == push.ledger.epoch:
                self._account(push, write, now)
        return failed

    def undisturbed(self, push: Push) -> bool:
        """Whether all open WRITEs are still under way. Asking is what moves them on."""
        return all(self._link.poll(handle) == "open" for write in push.writes for handle in write.handles)

    def close_rest(self, push: Push, rest: Rest, *, failed: bool = False) -> None:
        """Ends the range that is posted by layers once nothing of it is open, if all was posted or no more will be."""
        assert push.ledger is not None
        dropped = failed or push.failure or rest.epoch != push.ledger.epoch
        if rest.open or not (dropped or rest.posted == self._settings.regions):
            return
        if push.rest is rest:
            push.rest = None
        push.ledger.finish_write(rest.range, epoch=rest.epoch)

    def _account(self, push: Push, write: OpenWrite, now: float) -> None:
        self._learn(write.bytes / max(now - write.posted_at, 1e-6), write.bytes)
        push.bytes_done += write.bytes
        push.writes_done += 1
        push.first_done_at = push.first_done_at or now
        if not push.completed_at:
            push.bytes_early += write.bytes
        self._timeline.record(
            "write_done", push.transfer_id, start=write.range.start, stop=write.range.stop, bytes=write.bytes
        )

    def _learn(self, rate: float, size: int) -> None:
        """Corrects the rate. A WRITE that buffers swallow, or that ended long before it was looked at, tells little."""
        if not self._measured and size > SEND_BUFFER_BYTES:
            self._rate, self._measured = rate, True
        else:
            self._rate += 0.3 * min(1.0, size / (4 * SEND_BUFFER_BYTES)) * (rate - self._rate)

    def post(self, push: Push, ledger: Ledger, room: Room, now: float) -> None:
        """Posts what is settled and registered, as far as lease and room allow. Raises :class:`LinkError`."""
        if push.rest is None and not ledger.complete and room.left(push):
            missing = ledger.prompt_blocks - ledger.posted
            if self._worth_a_write(missing, push.settled_regions) and self._leased(push, now):
                rest = ledger.open_rest()
                push.rest = Rest(rest, ledger.epoch) if rest is not None else None
        if push.rest is not None:
            self._post_layers(push, ledger, push.rest, room, now)
        most = max(1, int(self._rate * TURN_SECONDS) // max(1, self._settings.block_bytes))
        while (write := ledger.next_write(most=most)) is not None:
            if not self._may_open(push, room, now):
                return
            opened = self._send(push, ledger, OpenWrite(write, ledger.epoch, [], 0, now), None)
            ledger.post(write)
            self._opened(push, opened, room)

    def _may_open(self, push: Push, room: Room, now: float) -> bool:
        """Whether another WRITE of this transfer may be opened; notes it when only others' stand in its way."""
        if room.left(push):
            return self._leased(push, now)
        if not push.writes:
            push.passed_over_at = push.passed_over_at or now
        return False

    @staticmethod
    def _opened(push: Push, write: OpenWrite, room: Room) -> None:
        push.writes.append(write)
        push.passed_over_at = 0.0
        room.take(push)

    def _leased(self, push: Push, now: float) -> bool:
        """No lease, no WRITE; a heartbeat may bring it back."""
        peer = self._peers.peers.get(push.engine_id or "")
        return peer is not None and peer.clock.holds(now)

    def _post_layers(self, push: Push, ledger: Ledger, rest: Rest, room: Room, now: float) -> None:
        """Posts the regions of the last chunk that have settled since the WRITE before, if they are worth one."""
        settled = self._settings.regions if ledger.complete else push.settled_regions
        if not ledger.complete and not self._due(push, rest, settled):
            return
        if settled == rest.posted or not self._may_open(push, room, now):
            return
        write = OpenWrite(rest.range, rest.epoch, [], 0, now, rest)
        self._opened(push, self._send(push, ledger, write, (rest.posted, settled)), room)
        rest.posted = settled
        rest.open += 1

    def _due(self, push: Push, rest: Rest, settled: int) -> bool:
        """Whether a part should be posted before the step has ended."""
        line_seconds = len(rest.range) * self._settings.block_bytes / self._settings.regions / self._rate
        push.next_part = next_part(
            self._settings.regions,
            settled=settled,
            posted=rest.posted,
            region_seconds=push.region_seconds,
            line_seconds=line_seconds,
        )
        return push.next_part <= settled and self._worth_a_write(len(rest.range), settled - rest.posted)

    def _worth_a_write(self, blocks: int, regions: int) -> bool:
        """Whether a part is, of so many regions of so many blocks, while more of the prompt is to come."""
        if regions <= 0:
            return False
        size = blocks * self._settings.block_bytes * regions // self._settings.regions
        return size >= min(SLICE_BYTES, self._settings.min_bytes)

    def _send(self, push: Push, ledger: Ledger, write: OpenWrite, regions: tuple[int, int] | None) -> OpenWrite:
        """Hands a WRITE to the transport. Parts of blocks are no news to decode: their COMMIT tells of them."""
        engine_id = push.engine_id
        assert engine_id is not None
        span = write.range
        local, remote = self._blocks(push, ledger, span)
        payload = encode(Progress(push.transfer_id, ledger.epoch, span.start, span.stop)) if regions is None else b""
        final = regions is None or regions[1] == self._settings.regions
        if final and self._checksum is not None and not push.whole and self._checked(push):
            push.checksums.append((span.start, span.stop, self._checksum(local[0])))
        began = time.perf_counter()
        posted = self._link.post(engine_id, local=local, remote=remote, payload=payload, regions=regions)
        self._recorder.observe("post_seconds", time.perf_counter() - began)
        self._recorder.count("descriptors", by=posted.descriptors)
        self._recorder.count("writes")
        write.handles, write.bytes = list(posted.handles), posted.bytes
        write.due_at = self._due_at(engine_id, write)
        layers = {} if regions is None else {"layers": list(regions)}
        self._timeline.record(
            "write_posted", push.transfer_id, start=span.start, stop=span.stop, bytes=write.bytes, **layers
        )
        return write

    def _due_at(self, engine_id: str, write: OpenWrite) -> float:
        """When the WRITE may have ended at the soonest: those to the same engine before it have to end, too."""
        now = write.posted_at
        self._free_at = {engine: free_at for engine, free_at in self._free_at.items() if free_at > now}
        free_at = self._free_at[engine_id] = self._free_at.get(engine_id, now) + write.bytes / self._rate
        return now + SOONEST * (free_at - now)

    def _checked(self, push: Push) -> bool:
        return zlib.crc32(push.transfer_id.encode()) % self._settings.check_every == 0

    def _blocks(self, push: Push, ledger: Ledger, write: Range) -> tuple[Groups, Groups]:
        registration = next(iter(push.registrations.values()))
        if push.whole:
            assert push.final_groups is not None
            return push.final_groups, registration.block_ids
        first = ledger.first_block or 0
        local = push.blocks[write.start : write.stop]
        if len(local) != len(write):
            raise LinkError(f"{len(push.blocks)} blocks known, {write.stop} settled")
        return [local], [registration.block_ids[0][write.start - first : write.stop - first]]
