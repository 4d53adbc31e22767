"""The load generator against a fake server on a real event loop, and what its records become."""

import asyncio
import itertools
import json
import re

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prebook_bench import ab, arguments, client, html_report, load, plots, stats, summary, tables
from prebook_bench.engines import EngineError
from prebook_bench.load import Arrival, Lengths, Record
from prebook_bench.summary import Slo

SLO = Slo(ttft=0.5, tpot=0.1)


def arrival(at: float = 0.0) -> Arrival:
    return Arrival(at=at, prompt_tokens=10, output_tokens=3, seed="s")


def answer(*arrivals: float, headers: dict[str, str] | None = None) -> client.Answer:
    return client.Answer(
        arrivals=arrivals, tokens=len(arrivals), end=arrivals[-1] + 0.01, text="", headers=headers or {}
    )


def test_poisson_arrivals_have_their_rate_and_no_memory() -> None:
    arrivals = load.plan(rate=5, count=4000, lengths=load.WORKLOADS["sonnet"], seed=1)
    gaps = [b.at - a.at for a, b in itertools.pairwise(arrivals)]
    mean = stats.mean(gaps)
    variance = stats.mean([(gap - mean) ** 2 for gap in gaps])
    assert mean == pytest.approx(1 / 5, rel=0.06)
    assert variance**0.5 / mean == pytest.approx(1, abs=0.08)  # an exponential's coefficient of variation
    assert load.plan(rate=5, count=50, lengths=load.WORKLOADS["sonnet"], seed=1) == arrivals[:50]
    assert load.plan(rate=5, count=50, lengths=load.WORKLOADS["sonnet"], seed=2) != arrivals[:50]


def test_chat_like_lengths_have_their_medians_and_a_long_tail() -> None:
    drawn = load.plan(rate=1, count=3000, lengths=load.WORKLOADS["sharegpt"], seed=3)
    prompts = [one.prompt_tokens for one in drawn]
    assert stats.median(prompts) == pytest.approx(120, rel=0.12)
    assert stats.percentile(prompts, p=95) > 6 * 120
    assert min(prompts) >= 16
    assert max(prompts) <= 4096


@pytest.mark.parametrize("text", ["", "sonet", "512", "0:5", "5:x", "-1:4"])
def test_unknown_workloads_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a workload"):
        load.parse_lengths(text)


def test_workloads_by_name_and_by_lengths() -> None:
    assert load.parse_lengths("sonnet").prompt == 512
    assert load.parse_lengths("2000:16") == Lengths("2000:16", "fixed", prompt=2000, output=16)


async def test_the_load_is_open_a_slow_server_does_not_slow_arrivals() -> None:
    sent, answered = [], 0
    loop = asyncio.get_running_loop()

    async def send(_session: aiohttp.ClientSession, _arrival: Arrival) -> client.Answer:
        nonlocal answered
        sent.append((loop.time(), answered))
        await asyncio.sleep(1.5)
        answered += 1
        return answer(1.5)

    async with aiohttp.ClientSession() as session:
        arrivals = [arrival(0.05 * n) for n in range(5)]
        records = await load.offer(arrivals, send=send, session=session, timeout_s=5)
    assert [before for _, before in sent] == [0] * 5  # all are sent before the first answer
    assert sent[-1][0] - sent[0][0] > 0.19
    assert [record.ok for record in records] == [True] * 5


async def test_latency_counts_from_the_scheduled_arrival() -> None:
    record = load.record_of(answer(0.2, 0.3, 0.5), arrival=arrival(), late=0.1)
    assert record.ttft == pytest.approx(0.3)
    assert record.e2e == pytest.approx(0.61)
    assert record.tpot == pytest.approx(0.15)
    assert record.itl == pytest.approx((0.1, 0.2))
    assert record.remote is None
    assert load.record_of(answer(0.1, headers={"x-prebook-transfer": "t"}), arrival=arrival(), late=0).remote is True
    assert load.record_of(answer(0.1, headers={"x-prebook-local": "short"}), arrival=arrival(), late=0).remote is False


async def test_failures_are_records_and_time_limits_hold() -> None:
    async def send(_session: aiohttp.ClientSession, one: Arrival) -> client.Answer:
        if one.at == 0:
            raise client.RequestError("HTTP 500: no")
        await asyncio.sleep(30)
        raise AssertionError("the time limit did not hold")

    async with aiohttp.ClientSession() as session:
        records = await load.offer([arrival(0), arrival(0.01)], send=send, session=session, timeout_s=0.2)
    assert [record.error for record in records] == ["RequestError: HTTP 500: no", "TimeoutError: no answer in time"]
    figures = summary.summarise(records, duration=1, slo=SLO)
    assert figures["answered"] == 0
    assert sum(figures["errors"].values()) == 2
    assert figures["ttft"] is None
    assert figures["goodput_share"] == 0


def records(count: int, *, ttft: float = 0.1, tpot: float = 0.05) -> list[Record]:
    return [
        Record(arrival=arrival(), late=0, ttft=ttft + n / 1e4, tpot=tpot, itl=(tpot,), e2e=1.0, tokens=3)
        for n in range(count)
    ]


def test_percentiles_need_enough_requests() -> None:
    few = summary.summarise(records(20), duration=10, slo=SLO)["ttft"]
    assert few["p90"] is not None
    assert few["p99"] is None
    many = summary.summarise(records(120), duration=10, slo=SLO)["ttft"]
    assert many["p99"]["low"] <= many["p99"]["value"] <= many["p99"]["high"]


def test_goodput_needs_both_objectives() -> None:
    mixed = records(5) + records(3, ttft=0.9) + records(2, tpot=0.3)
    mixed.append(Record(arrival=arrival(), late=0, error="TimeoutError: no answer in time"))
    figures = summary.summarise(mixed, duration=10, slo=SLO)
    assert figures["goodput_per_second"] == pytest.approx(0.5)
    assert figures["goodput_share"] == pytest.approx(5 / 11)
    assert figures["requests_per_second"] == pytest.approx(1.0)


def options() -> ab.AbOptions:
    return ab.AbOptions(
        rates=(40.0, 80.0), requests=24, rounds=2, lengths=Lengths("8:4", "fixed", prompt=8, output=4), slo=SLO,
        vocabulary=512, model="m", timeout_s=5,
    )  # fmt: skip


class Model:
    """A completion server that waits before the first token."""

    def __init__(self, *, delay: float) -> None:
        self.delay = delay
        self.prompts: list[list[int]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.prompts.append(body["prompt"])
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(self.delay)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.sleep(0.002)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served"}]})

    def server(self) -> TestServer:
        application = web.Application()
        application.router.add_post("/v1/completions", self.answer)
        application.router.add_get("/v1/models", self.models)
        return TestServer(application)


async def ab_report() -> tuple[dict[str, object], Model, Model]:
    slow, fast = Model(delay=0.5), Model(delay=0.02)
    async with slow.server() as one, fast.server() as two:
        endpoints = {"pull": str(one.make_url("/")), "prebook": str(two.make_url("/v1"))}
        report = await ab.run_endpoints(endpoints, options=options(), command=["x"], progress=lambda _: None)
    return report, slow, fast


async def test_two_endpoints_get_the_same_prompts_and_the_slow_one_loses() -> None:
    report, slow, fast = await ab_report()
    assert sorted(slow.prompts) == sorted(fast.prompts)
    assert len(slow.prompts) == 2 + 2 * 24  # warm-up and two rates
    rows = report["summary"]
    assert isinstance(rows, list)
    assert [(row["target"], row["rate"]) for row in rows] == [
        ("pull", 40.0), ("prebook", 40.0), ("pull", 80.0), ("prebook", 80.0),
    ]  # fmt: skip
    assert all(row["answered"] == 24 and row["requests"] == 24 for row in rows)
    assert report["ratios"]["40"]["prebook"]["ttft_p50"] > 1.5  # type: ignore[index]
    assert report["ratios"]["40"]["pull"]["ttft_p50"] == 1  # type: ignore[index]
    assert "prebook" in tables.ab_table(report)


async def test_the_page_is_self_contained_and_escapes_what_it_is_given() -> None:
    report, _, _ = await ab_report()
    report = json.loads(json.dumps(report).replace('"prebook"', '"<script>alert(1)</script>"'))
    page = html_report.html(report)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") >= 4
    assert not re.findall(r'(?:src|href)="', page)
    assert "viewport" in page


def test_a_report_of_an_unknown_kind_has_no_page() -> None:
    with pytest.raises(ValueError, match="no page"):
        html_report.html({"measurement": "idle"})


async def test_the_model_is_asked_of_the_endpoint() -> None:
    async with Model(delay=0).server() as running:
        assert await ab.served_model(str(running.make_url("/v1/"))) == "served"
    with pytest.raises(client.RequestError, match="lists no model"):
        await ab.served_model("http://127.0.0.1:9")


def test_endpoint_arguments() -> None:
    assert arguments.endpoints("a=http://x:1,b=https://y") == {"a": "http://x:1", "b": "https://y"}
    for text in ("http://x", "a=", "a=ftp://x", "a=http://x,a=http://y"):
        with pytest.raises(Exception, match=r"NAME=URL|two endpoints"):
            arguments.endpoints(text)


async def test_failures_and_deaths_are_results_of_the_run() -> None:
    """One target fails every request, one dies in its second turn; the third is measured to the end."""
    turns = {"dies": 0}

    async def good(_session: aiohttp.ClientSession, _arrival: Arrival) -> client.Answer:
        return answer(0.01, 0.02, 0.03)

    async def bad(_session: aiohttp.ClientSession, _arrival: Arrival) -> client.Answer:
        raise client.RequestError("HTTP 500")

    def check() -> None:
        turns["dies"] += 1
        if turns["dies"] > 3:  # two warm-up requests and the first turn
            raise EngineError("push/decode ended with -9")

    targets = [
        ab.Target(name="fails", base_url=None, send=bad),
        ab.Target(name="dies", base_url=None, send=good, check=check),
        ab.Target(name="good", base_url=None, send=good),
    ]
    measured = ab.Measured()
    await ab.measure(targets, options=options(), into=measured, progress=lambda _: None)
    report = ab.report(measured, options=options(), about={})
    rows = {(row["target"], row["rate"]): row for row in report["summary"]}
    assert rows["fails", 40.0]["answered"] == 0
    assert sum(rows["fails", 40.0]["errors"].values()) == 24
    assert rows["good", 80.0]["answered"] == 24
    assert ("dies", 80.0) not in rows
    died = [error for error in report["errors"] if error["phase"] == "died"]
    assert [(error["target"], error["error"]) for error in died] == [("dies", "push/decode ended with -9")]
    assert json.loads(json.dumps(report))["ratios_to"] == "fails"


def test_a_plot_of_negative_differences_reaches_below_zero() -> None:
    drawn = plots.lines(
        "t", [plots.Series(name="push", colour="#000", points=[(1, -90.0), (2, 200.0)])], x_label="x", y_label="y"
    )
    assert ">-100<" in drawn
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', drawn)]
    assert heights[0] > heights[1]


def test_many_series_have_a_legend_of_two_rows() -> None:
    names = ["pull", "push", "prebook", "aggregated", "prebook-first", "one more of them"]
    drawn = plots.lines(
        "t", [plots.Series(name=name, colour="#000", points=[(1, 1.0)]) for name in names], x_label="x", y_label="y"
    )
    assert len(set(re.findall(r'<rect x="[\d.]+" y="([\d.]+)" width="12"', drawn))) == 2


def test_every_series_has_a_lane_of_its_own() -> None:
    made = [plots.Series(name=name, colour=f"#00{n}", points=[(0, 0), (1, 10.0 * n)]) for n, name in enumerate("abc")]
    drawn = plots.lanes("link", made, x_label="seconds", y_label="Mbit/s")
    shapes = re.findall(r'<polygon points="([^"]+)" fill="(#00\d)"', drawn)
    assert [colour for _, colour in shapes] == ["#000", "#001", "#002"]
    spans = []
    for points, _ in shapes:
        heights = [float(point.split(",")[1]) for point in points.split()]
        spans.append((min(heights), max(heights)))
    assert spans[0][1] < spans[1][0] < spans[1][1] < spans[2][0], "lanes overlap"
    assert spans[0][0] == spans[0][1], "nothing was sent"
    assert (spans[2][1] - spans[2][0]) == 2 * (spans[1][1] - spans[1][0]), "lanes differ in scale"
