"""The rig on real namespaces: set-up, the link's rate, clean-up after any kind of end. Needs root and iproute2."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prebook_bench import link_use, rig
from prebook_bench.link import measure_bits_per_second

pytestmark = pytest.mark.skipif(rig.why_not() is not None, reason=f"no rig on this machine: {rig.why_not()}")

CORES = ((0,), (0,))


def things() -> set[str]:
    """Namespaces and interfaces of ours on this machine."""
    spaces = json.loads(subprocess.check_output(["ip", "-j", "netns", "list"]) or b"[]")
    links = json.loads(subprocess.check_output(["ip", "-j", "link"]))
    names = [entry["name"] for entry in spaces] + [entry["ifname"] for entry in links]
    return {name for name in names if name.startswith(("prebook-", "pbb", "pbp", "pbd"))}


def ours(pid: int) -> set[str]:
    return {name for name in things() if str(pid) in name}


def test_set_up_and_clean_up() -> None:
    with rig.shaped(rate="400mbit", cores=CORES) as made:
        assert len(ours(os.getpid())) == 5  # two namespaces, the bridge, two ends of veth
        assert made.prefill.address != made.decode.address
        reached = subprocess.run(
            [*made.prefill.prefix, sys.executable, "-c", "import socket, sys; s = socket.socket(socket.AF_INET, "
             "socket.SOCK_DGRAM); s.connect((sys.argv[1], 9)); print(s.getsockname()[0])", made.decode.address],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert reached.stdout.strip() == made.prefill.address
    assert ours(os.getpid()) == set()


def test_the_link_has_its_rate_in_one_direction_only() -> None:
    with rig.shaped(rate="200mbit", cores=CORES) as made:
        forward = measure_bits_per_second(made)
        backward = measure_bits_per_second(rig.Rig(prefill=made.decode, decode=made.prefill, rate=None))
    assert 120e6 < forward < 210e6
    assert backward > 300e6


async def test_the_counter_of_the_link_sees_what_reaches_decode() -> None:
    with rig.shaped(rate="200mbit", cores=CORES) as made:
        assert made.crossed is not None
        async with link_use.watched(made.crossed) as readings:
            await asyncio.to_thread(measure_bits_per_second, made)
        forward = link_use.describe(readings, bits_per_second=200e6)
        backwards = rig.Rig(prefill=made.decode, decode=made.prefill, rate=None)
        async with link_use.watched(made.crossed) as readings:
            await asyncio.to_thread(measure_bits_per_second, backwards)
        backward = link_use.describe(readings, bits_per_second=200e6)
    assert forward is not None
    assert backward is not None
    assert forward["bytes"] > 20e6  # a second and a half at 200 Mbit/s
    assert forward["peak_bits_per_second"] < 400e6
    assert backward["bytes"] < forward["bytes"] / 4  # acknowledgements only


def test_packets_are_processed_where_no_engine_computes() -> None:
    with rig.shaped(rate="200mbit", cores=CORES) as made:
        steering = f"/sys/class/net/pbp{os.getpid()}/queues/rx-0/rps_cpus"
        if not made.link_cores:
            pytest.skip("this kernel cannot steer packets")
        spare = os.sched_getaffinity(0) - {0}
        assert set(made.link_cores) == (spare or {0})
        words = Path(steering).read_text().strip().replace(",", "")
        inside = subprocess.check_output([*made.prefill.prefix, "cat", "/sys/class/net/eth0/queues/rx-0/rps_cpus"])
    assert int(words, 16) == sum(1 << core for core in made.link_cores)
    assert int(inside.decode().strip().replace(",", ""), 16) == int(words, 16)


@pytest.mark.parametrize(
    ("machine", "engines", "expected"),
    [({0, 1}, ((0,), (1,)), (1,)), ({0, 1, 2, 3}, ((0,), (1,)), (2, 3)), ({0}, ((0,), (0,)), (0,))],
    ids=["decode's, where there are only two", "spare ones", "the only one"],
)
def test_prefills_core_does_not_do_the_links_work(
    monkeypatch: pytest.MonkeyPatch,
    machine: set[int],
    engines: tuple[tuple[int, ...], tuple[int, ...]],
    expected: tuple[int, ...],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: machine)
    assert rig._link_cores(engines) == expected


def fail_inside() -> None:
    """Raises inside a rig in which a process runs; the process is the exception's argument."""
    with rig.shaped(rate="1gbit", cores=CORES) as made:
        raise RuntimeError(subprocess.Popen([*made.decode.prefix, "sleep", "600"]))


def test_clean_up_after_an_error_inside_also_ends_processes_left_there() -> None:
    with pytest.raises(RuntimeError) as failed:
        fail_inside()
    sleeper = failed.value.args[0]
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert ours(os.getpid()) == set()


def test_leftovers_of_a_killed_run_are_removed_by_the_next() -> None:
    code = (
        "import sys, time; from prebook_bench import rig\n"
        "with rig.shaped(rate='1gbit', cores=((0,), (0,))): print('up', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "up"
    child.kill()
    child.wait()
    assert ours(child.pid)
    deadline = time.monotonic() + 10
    while ours(child.pid) and time.monotonic() < deadline:
        rig.remove_leftovers()
    assert ours(child.pid) == set()


def test_a_rate_that_tc_would_not_take_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="not a rate"), rig.shaped(rate="warp", cores=CORES):
        pytest.fail("the rig was set up")
    assert ours(os.getpid()) == set()
