"""A kind that is installed, or taken away, while the operator runs."""

from __future__ import annotations

import time

from tests.apiserver.podmonitors import pod_monitors
from tests.apiserver.rig import World
from tests.apiserver.test_operator_create import pinned
from tests.kube.controlplane import wait_for
from tests.model_documents import changed


def test_a_pod_monitor_is_made_as_soon_as_the_kind_exists_and_forgotten_with_it(world: World) -> None:
    operator = world.operator(discovery=0.5)
    world.create(changed(pinned(), {"spec/monitoring": {"podMonitor": True}}))
    world.create(pinned("unwatched"))
    world.settle(operator, "demo")
    world.settle(operator, "unwatched")

    def cached() -> int:
        return int(
            operator.call(
                lambda o: sum(place[0] == "podmonitors" for name in o.cache.models for place in o.cache.children(name))
            )
        )

    def monitors() -> list[str]:
        return [one["metadata"]["name"] for one in world.list("podmonitors", group="monitoring.coreos.com/v1")]

    with pod_monitors(world.api):
        wait_for("the PodMonitor", lambda: monitors() == ["demo"], seconds=60)
        world.api.delete(
            f"/apis/monitoring.coreos.com/v1/namespaces/{world.namespace}/podmonitors/demo",
        )
        wait_for("it to be back: the kind is watched", lambda: monitors() == ["demo"], seconds=60)
        wait_for("it to be known", lambda: cached() == 1, seconds=30)
    wait_for("it to be forgotten", lambda: cached() == 0, seconds=60)
    wait_for("nothing to do", operator.idle, seconds=60)
    since = world.cp.audit.position()
    time.sleep(3.0)
    assert world.writes(since) == [], "nothing is written to a kind that is gone"
    assert world.condition("demo", "Stalled")["status"] == "False"
    world.change("unwatched", {"networkPolicy": {"enabled": False}})
    wait_for(
        "the new watches to work",
        lambda: not any(name.startswith("networkpolicies/unwatched") for name in world.children()),
        seconds=60,
    )
