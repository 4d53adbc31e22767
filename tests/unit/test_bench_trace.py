"""Timelines: clock alignment, spans, the Chrome trace, the picture and the page."""

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_bench.trace import command
from prebook_bench.trace.chrome import chrome_trace
from prebook_bench.trace.events import TraceError, clock_offset, group, parse_line, read_folder
from prebook_bench.trace.picture import picture
from prebook_bench.trace.spans import tell

CHUNK, BYTES = 512, 512 * 16384


def line(at: float, role: str, event: str, *, transfer: str = "abcd1234", skew: float = 0.0, **data: Any) -> str:
    return json.dumps(
        {"t": at + skew, "mono": at - 1000, "engine": f"e-{role}", "role": role, "rank": 0,
         "transfer_id": transfer, "event": event, "data": data}
    )  # fmt: skip


def timeline(*, transfer: str = "abcd1234", start: float = 5000.0, skew: float = 0.0, chunks: int = 4) -> list[str]:
    """A request of `chunks` chunks of a second each; decode's wall clock is `skew` seconds ahead."""
    lines = [
        line(start, "decode", "booked", transfer=transfer, skew=skew, blocks=4 * chunks, tokens=CHUNK * chunks),
        line(start + 0.01, "decode", "reg_sent", transfer=transfer, skew=skew),
        line(start + 0.02, "prefill", "reg_received", transfer=transfer),
        line(start + 0.05, "prefill", "prefill_started", transfer=transfer, tokens=CHUNK * chunks),
    ]
    for n in range(chunks):
        settled = start + 0.05 + n + 1
        lines.append(line(settled, "prefill", "chunk_settled", transfer=transfer, tokens=CHUNK * (n + 1)))
        if n == chunks - 1:
            lines.append(line(settled, "prefill", "prefill_finished", transfer=transfer))
        block = {"start": 4 * n, "stop": 4 * n + 4, "bytes": BYTES}
        lines.append(line(settled + 0.001, "prefill", "write_posted", transfer=transfer, **block))
        lines.append(line(settled + 0.07, "prefill", "write_done", transfer=transfer, **block))
        lines.append(
            line(settled + 0.071, "decode", "write_landed", transfer=transfer, skew=skew, start=4 * n, stop=4 * n + 4)
        )
    end = start + 0.05 + chunks + 0.08
    lines.append(line(end, "prefill", "commit_sent", transfer=transfer, bytes=BYTES * chunks, writes=chunks))
    lines.append(line(end + 0.005, "decode", "committed", transfer=transfer, skew=skew, reason=None))
    return lines


def story_of(lines: list[str]) -> Any:
    (transfer,) = group([parse_line(text) for text in lines])
    return tell(transfer)


def test_the_story_of_a_transfer() -> None:
    story = story_of(timeline())
    assert story.tokens == 2048
    assert story.pushed_bytes == 4 * BYTES
    assert story.lead == pytest.approx(4.03)
    assert story.exposed == pytest.approx(0.085)
    chunks = [span for span in story.spans if span.lane == "prefill"]
    assert [span.name for span in chunks] == [f"prefill tokens {n * 512}-{n * 512 + 512}" for n in range(4)]
    assert chunks[0].end - chunks[0].start == pytest.approx(1)
    writes = [span for span in story.spans if span.lane == "link"]
    assert [span.end - span.start for span in writes] == pytest.approx([0.069] * 4)
    assert [message.name for message in story.messages] == ["REG", "COMMIT"]


@given(st.floats(min_value=-1e4, max_value=1e4))
def test_clocks_that_differ_are_aligned_to_within_the_messages(skew: float) -> None:
    story = story_of(timeline(skew=skew))
    assert story.exposed == pytest.approx(0.085, abs=0.061)  # REG and COMMIT took 10 and 5 ms; the slack is 50
    for message in story.messages:
        assert message.received >= message.sent - 0.051


def test_clocks_that_agree_are_left_alone() -> None:
    (transfer,) = group([parse_line(text) for text in timeline()])
    assert transfer.offsets == {"decode": 0.0}
    assert clock_offset([]) == 0.0


def test_a_step_of_the_wall_clock_does_not_reorder_events() -> None:
    lines = timeline()
    stepped = [json.loads(text) for text in lines]
    for event in stepped[-4:]:
        event["t"] -= 3600
    story = story_of([json.dumps(event) for event in stepped])
    assert story.exposed == pytest.approx(0.085, abs=0.011)


def test_a_range_that_is_written_twice_gives_two_spans() -> None:
    block = {"start": 0, "stop": 4, "bytes": 10}
    lines = [line(1.0, "prefill", "prefill_started", tokens=64)]
    lines += [line(at, "prefill", name, **block) for at, name in
              ((2.0, "write_posted"), (2.5, "write_done"), (3.0, "write_posted"), (3.25, "write_done"))]  # fmt: skip
    writes = [span for span in story_of(lines).spans if span.kind == "write"]
    assert [span.end - span.start for span in writes] == pytest.approx([0.5, 0.25])


def test_transfers_are_told_apart_and_sorted() -> None:
    lines = timeline(transfer="second", start=6000) + timeline(transfer="first", start=5000)
    assert [transfer.transfer_id for transfer in group([parse_line(text) for text in lines])] == ["first", "second"]


@pytest.mark.parametrize("kept", range(1, 22, 3))
def test_a_transfer_that_ends_anywhere_can_be_drawn(kept: int) -> None:
    story = story_of(timeline()[:kept])
    xml.etree.ElementTree.fromstring(picture(story))
    json.dumps(chrome_trace([story]))


def test_the_picture_is_well_formed_and_says_what_happened() -> None:
    text = picture(story_of(timeline()))
    root = xml.etree.ElementTree.fromstring(text)
    words = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
    assert "2048 prompt tokens" in words
    assert "booked 4030 ms before prefill finished" in words
    assert "REG" in words
    assert "COMMIT" in words
    assert "<script" not in text


def test_the_chrome_trace_has_the_fields_that_viewers_need() -> None:
    trace = chrome_trace([story_of(timeline())])
    json.dumps(trace)
    events = trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 4 + 4 + 1
    assert all({"name", "pid", "tid", "ts", "dur"} <= set(event) for event in complete)
    assert min(event["ts"] for event in complete) == 0
    flows = [event["id"] for event in events if event["ph"] in "sf"]
    assert sorted(flows) == sorted([*set(flows), *set(flows)])  # each begins and ends once


def write(folder: Path, lines: list[str], *, end: str = "\n") -> None:
    (folder / "prefill-e-0.jsonl").write_text("\n".join(lines) + end, encoding="utf-8")


def test_command_writes_all_three_formats(tmp_path: Path) -> None:
    write(tmp_path, timeline(transfer="short", start=5000, chunks=2) + timeline(transfer="long", start=5100, chunks=5))
    for name in ("a.json", "a.svg", "a.html"):
        assert "transfers" in command.run(tmp_path, out=tmp_path / name, transfer="longest", limit=5)
    assert len({event["pid"] for event in json.loads((tmp_path / "a.json").read_text())["traceEvents"]}) == 2
    assert "2560 prompt tokens" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.html").read_text().count("<svg") == 2


def test_a_line_cut_off_by_a_kill_is_left_out_and_damage_elsewhere_is_named(tmp_path: Path) -> None:
    lines = timeline()
    write(tmp_path, [*lines, lines[0][:20]], end="")
    assert len(read_folder(tmp_path)) == len(lines)
    write(tmp_path, [lines[0], "garbage", lines[1]])
    with pytest.raises(TraceError, match=r"prefill-e-0\.jsonl, line 2"):
        read_folder(tmp_path)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no timelines"):
        read_folder(tmp_path)
    write(tmp_path, timeline())
    with pytest.raises(TraceError, match=r"\.html, \.svg or \.json"):
        command.run(tmp_path, out=tmp_path / "a.png", transfer="last", limit=1)
    with pytest.raises(TraceError, match="0 transfers begin with 'zz'"):
        command.run(tmp_path, out=tmp_path / "a.svg", transfer="zz", limit=1)
