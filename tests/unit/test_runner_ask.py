"""The account of a transfer, as `prebook up --ask` reads it back after the answer."""

from __future__ import annotations

import pytest
from aiohttp import web

from prebook_operator.local.ask import fetch_account
from prebook_operator.local.state import PodRow

COMMITTED = {"known": True, "state": "committed", "prefill_engine_id": "p"}
FROM_DISPATCH = {**COMMITTED, "prefill_leg_s": 0.5}


@pytest.mark.parametrize(
    ("told", "leg", "looks"),
    [([FROM_DISPATCH], 0.5, 1), ([COMMITTED, FROM_DISPATCH], 0.5, 2), ([COMMITTED], None, 2)],
)
async def test_the_dispatchers_account_is_worth_one_more_look(
    told: list[dict[str, object]], leg: float | None, looks: int
) -> None:
    asked = 0

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.json_response(told[min(asked, len(told)) - 1])

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        pod = PodRow(
            name="d", short="decode-0", role="decode", ip="127.0.0.1", port=runner.addresses[0][1], phase="Ready"
        )
        found = await fetch_account("abc", pods=[pod])
    finally:
        await runner.cleanup()
    assert found is not None
    assert (found.prefill_leg_s, asked) == (leg, looks)
