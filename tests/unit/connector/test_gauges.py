"""Gauges cost the engine's loop next to nothing, and still say that the last transfer has ended."""

from __future__ import annotations

from prebook_connector.gauges import MEASURE_SECONDS, Gauges
from prebook_connector.recorder import MemoryRecorder
from prebook_connector.transfer_thread import Core
from tests.unit.connector.scenario import World, resting_thread


def gauges_of(core: Core, recorder: MemoryRecorder) -> Gauges:
    return Gauges(resting_thread(core), recorder)


def measured(gauges: Gauges, recorder: MemoryRecorder, now: float) -> dict[str, float]:
    gauges.measure(now)
    taken = recorder.take()
    return taken["gauges"] if taken is not None else {}


def test_a_booking_shows_at_once_and_so_does_its_end(world: World) -> None:
    recorder = MemoryRecorder()
    gauges = gauges_of(world.decode.core, recorder)
    assert measured(gauges, recorder, 10.0)["booked_blocks"] == 0
    transfer = world.new("t", 32)
    world.book(transfer)
    assert measured(gauges, recorder, 10.001)["booked_blocks"] > 0
    world.queue(transfer)
    world.chunk(transfer, 32)
    world.net.advance(2.0)
    assert not world.decode.core.busy
    assert measured(gauges, recorder, 10.002)["booked_blocks"] == 0


def test_open_pushes_are_prefills(world: World) -> None:
    recorder = MemoryRecorder()
    gauges = gauges_of(world.prefill.core, recorder)
    assert measured(gauges, recorder, 10.0) == {"open_pushes": 0, "queue_depth": 0, "peers_attached": 1}
    world.queue(world.new("t", 32))
    assert measured(gauges, recorder, 10.001) == {"open_pushes": 1}


def test_while_the_same_goes_on_they_are_read_ten_times_a_second(world: World) -> None:
    recorder = MemoryRecorder()
    gauges = gauges_of(world.decode.core, recorder)
    for name in ("a", "b"):
        world.book(world.new(name, 32))
        if name == "a":
            one = measured(gauges, recorder, 10.0)["booked_blocks"]
    assert measured(gauges, recorder, 10.0 + MEASURE_SECONDS / 2) == {}
    assert measured(gauges, recorder, 10.0 + MEASURE_SECONDS) == {"booked_blocks": 2 * one}
