"""The cache: only news wakes anybody, old news is ignored, and deletions in a gap are noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from yarl import URL

from prebook_operator.cache import Cache, Seen
from prebook_operator.kube.progress import Scope, scope_of
from prebook_operator.records import ChildRecord, Key, ModelRecord, NodeRecord, PodRecord

KEY = Key("ns", "demo")


def child(name: str = "demo", *, version: int = 5, uid: str = "u", owner: str = "o") -> ChildRecord:
    return ChildRecord(
        plural="services",
        name=name,
        uid=uid,
        version=version,
        generation=0,
        owner=owner,
        deleting=False,
        owned=b"digest",
    )


def model(*, version: int = 5, spec: bytes = b"{}") -> ModelRecord:
    return ModelRecord(key=KEY, uid="m", version=version, generation=1, deleting=False, spec=spec, status=b"{}")


def seen(record: ChildRecord, *, deleted: bool = False, listed: bool = False) -> Seen:
    return Seen("services", KEY, record, deleted, listed)


def test_an_echo_wakes_nobody() -> None:
    cache = Cache()
    assert cache.put("services", KEY, child(version=7)) == {KEY}
    assert cache.see(seen(child(version=7))) == frozenset()
    assert cache.see(seen(child(version=8))) == frozenset(), "only the version differs"
    assert cache.see(seen(replace(child(version=9), owned=b"other"))) == {KEY}


def test_old_news_does_not_undo_newer() -> None:
    cache = Cache()
    cache.put("services", KEY, child(version=9))
    assert cache.see(seen(replace(child(version=8), owned=b"old"))) == frozenset()
    assert cache.see(seen(child(version=8, uid="before"), deleted=True)) == frozenset()
    assert cache.children(KEY)["services", "demo"].version == 9


def test_a_deletion_removes() -> None:
    cache = Cache()
    cache.put("services", KEY, child())
    assert cache.see(seen(child(version=6), deleted=True)) == {KEY}
    assert cache.children(KEY) == {}
    assert cache.objects() == 0


def test_what_a_new_list_lacks_has_been_deleted() -> None:
    cache = Cache()
    cache.put("services", KEY, child("kept"))
    cache.put("services", KEY, child("gone"))
    cache.put("services", Key("other", "demo"), child("elsewhere"))
    cache.begin_list(Scope("services", "ns"))
    cache.see(seen(child("kept"), listed=True))
    assert cache.end_list(Scope("services", "ns")) == {KEY}
    assert {name for _, name in cache.children(KEY)} == {"kept"}
    assert {name for _, name in cache.children(Key("other", "demo"))} == {"elsewhere"}


def test_what_was_created_during_a_list_is_not_taken_for_deleted() -> None:
    cache = Cache()
    cache.begin_list(Scope("services", None))
    cache.see(seen(child("new")))
    assert cache.end_list(Scope("services", None)) == frozenset()
    assert ("services", "new") in cache.children(KEY)


def test_nodes_matter_to_models_that_name_hardware_only() -> None:
    cache = Cache()
    node = NodeRecord("n", 1, True, True, "z", (), ())
    cache.put("disaggregatedmodels", KEY, model())
    assert cache.see(Seen("nodes", None, node, False, False)) == frozenset()
    cache.put("disaggregatedmodels", KEY, model(version=6, spec=b'{"hardware":{"profile":"p5en.48xlarge"}}'))
    assert cache.see(Seen("nodes", None, replace(node, version=2, ready=False), False, False)) == {KEY}
    assert cache.see(Seen("nodes", None, replace(node, version=3, ready=False), False, False)) == frozenset()


def test_pods_are_kept_by_model() -> None:
    cache = Cache()
    pod = PodRecord("p", "u", 3, "s", "decode", "r", "", False, False, False, False, "", "", 0)
    assert cache.see(Seen("pods", KEY, pod, False, False)) == {KEY}
    assert cache.pods(KEY) == {"p": pod}


PLURALS = frozenset({"pods", "statefulsets"})


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/api/v1/pods", Scope("pods", None)),
        ("/api/v1/namespaces/a/pods", Scope("pods", "a")),
        ("/apis/apps/v1/namespaces/a/statefulsets", Scope("statefulsets", "a")),
        ("/api/v1/namespaces/a/pods/x", None),
        ("/api/v1/namespaces", None),
        ("/apis/metrics.k8s.io/v1/extra/deep/namespaces/a/pods", None),
        ("/healthz", None),
    ],
)
def test_scopes_are_read_from_urls(path: str, scope: Scope | None) -> None:
    assert scope_of(URL(f"https://host:6443{path}?watch=true"), PLURALS) == scope
