"""The table of rights: what it must not hold, and that it covers what the operator's client can name."""

from __future__ import annotations

import pytest

from prebook_operator import rbac
from prebook_operator.kube import resources


def verbs(group: str, resource: str) -> set[str]:
    """What the operator may do with one resource, anywhere."""
    return {verb for rule in rbac.OPERATOR if rule.group == group and resource in rule.resources for verb in rule.verbs}


def test_no_wildcards() -> None:
    for rule in rbac.OPERATOR:
        assert "*" not in (rule.group, *rule.resources, *rule.verbs)


def test_secrets_can_be_neither_listed_nor_changed() -> None:
    assert verbs("", "secrets") == {"get", "create"}


def test_a_models_spec_is_never_written() -> None:
    assert verbs("prebook.dev", "disaggregatedmodels") == {"list", "watch"}


@pytest.mark.parametrize(
    ("group", "resource"),
    [
        ("", "pods/exec"),
        ("", "pods/eviction"),
        ("", "namespaces"),
        ("", "configmaps"),
        ("rbac.authorization.k8s.io", "roles"),
        ("rbac.authorization.k8s.io", "clusterroles"),
        ("authentication.k8s.io", "tokenreviews"),
    ],
)
def test_nothing_that_would_lead_to_more_rights(group: str, resource: str) -> None:
    assert not verbs(group, resource)


def test_pods_are_not_made_or_changed() -> None:
    assert verbs("", "pods") == verbs("", "nodes") == {"list", "watch"}


def test_every_rule_says_why() -> None:
    for why in [rule.why for rule in rbac.OPERATOR] + [rule.why for rule in rbac.USERS]:
        assert why.strip()
        assert "\n" not in why


@pytest.mark.parametrize("resource", resources.CHILDREN, ids=lambda resource: resource.plural)
def test_children_can_be_watched_and_applied_and_deleted_where_one_can_be_surplus(resource: resources.Resource) -> None:
    kept = {"get", "list", "watch", "create", "patch"}
    wanted = kept if resource in resources.PERMANENT else kept | {"delete"}
    assert verbs(resource.group, resource.plural) == wanted


def test_table_names_no_resource_that_the_client_does_not_know() -> None:
    known = {(resource.group, resource.plural) for resource in resources.BY_KIND.values()}
    known |= {(resource.group, resource.plural) for resource in resources.CHILDREN}
    named = {(rule.group, name.partition("/")[0]) for rule in rbac.OPERATOR for name in rule.resources}
    assert named <= known


def test_edit_and_admin_add_to_view() -> None:
    def granted(role: rbac.UserRole) -> set[tuple[str, str]]:
        return {
            (name, verb) for rule in rbac.USERS if rule.role is role for name in rule.resources for verb in rule.verbs
        }

    view, edit, admin = granted(rbac.UserRole.VIEW), granted(rbac.UserRole.EDIT), granted(rbac.UserRole.ADMIN)
    assert all(verb in {"get", "list", "watch"} for _, verb in view)
    assert ("disaggregatedmodels", "create") in edit - view
    assert ("modelroles", "delete") in admin - edit - view
    assert not any(
        name.endswith("/status") and verb not in {"get", "list", "watch"} for name, verb in view | edit | admin
    )
