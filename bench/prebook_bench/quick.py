"""A small tour in one run: exposed transfer by prompt length, then an A/B at a few request rates, on the same engines.

Enough to see the shape of things on this machine; too few requests for a tail. For figures to rely on, `exposed` and
`ab` with more repeats and requests.
"""

from __future__ import annotations

import time
from typing import Any

from prebook_bench import ab, exposed, fleet
from prebook_bench.setting import Setting


async def measure(options: exposed.ExposedOptions, *, load: ab.AbOptions, setting: Setting) -> dict[str, Any]:
    """Returns the report: the reports of `exposed` and of `ab` under these names. Raises what these raise."""
    about = setting.about()
    started = time.monotonic()
    run, measured = exposed.Run(), ab.Measured()
    for batch in setting.batches:
        async with fleet.running_pairs(
            batch, rig=setting.rig, options=setting.pair, progress=setting.progress
        ) as pairs:
            moving = [pair for pair in pairs if pair.mode.transfers]
            await exposed.measure_pairs(moving, among=pairs, options=options, setting=setting, run=run)
            targets = [ab.pair_target(one, among=pairs, options=load, setting=setting) for one in pairs]
            await ab.measure(targets, options=load, into=measured, progress=setting.progress)
    return {
        "measurement": "quick",
        **about,
        "seconds": round(time.monotonic() - started, 1),
        "exposed": exposed.report(run, options=options, setting=setting, about=about),
        "ab": ab.report(measured, options=load, about=about),
    }
