"""Many models: the cost of each stays what it is for one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tests.apiserver.rig import World
from tests.apiserver.test_operator_create import pinned
from tests.kube.controlplane import wait_for

NUMBER = 100


def test_a_hundred_models_cost_a_hundred_times_one_and_a_restart_nothing(world: World) -> None:
    first = world.operator()
    since = world.cp.audit.position()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: world.create(pinned(f"m{index:03}")), range(NUMBER)))

    def reported() -> bool:
        models = world.api.items(world.models)
        statuses = [model.get("status") or {} for model in models]
        reasons = [
            one["reason"] for status in statuses for one in status.get("conditions", ()) if one["type"] == "Ready"
        ]
        return len(reasons) == NUMBER and "NewGeneration" not in reasons and first.idle()

    wait_for("every model to be reported", reported, seconds=240, interval=1.0)
    assert len(world.sets()) == 2 * NUMBER
    asked = [
        one
        for one in world.cp.audit.requests(since=since, user=world.user)
        if one.resource != "leases" and one.verb not in ("watch", "list") and "/openapi" not in one.uri
    ]
    assert len(asked) <= 16 * NUMBER + 10, len(asked)
    time.sleep(3.0)
    first.stop()
    since = world.cp.audit.position()
    second = world.operator()
    wait_for("everything to be looked at", second.idle, seconds=120)
    time.sleep(3.0)
    assert world.writes(since) == []
    count = second.running.metrics.registry.get_sample_value("prebook_reconciliations_total", {"result": "ok"})
    assert count is not None
    assert count >= NUMBER
