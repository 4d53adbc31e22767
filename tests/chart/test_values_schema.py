"""The values schema is strict: a typing error is an error, with the path of the field, and not a silent default."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.chart.helm import CHART, Helm, HelmFailed


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ('scope="cluster"', "scope"),
        ("replicas=0", "replicas"),
        ('replicas="2"', "replicas"),
        ("replica=3", "replica"),
        ('image={"repository": ""}', "repository"),
        ('image={"repository": "r", "digest": "sha256:abc"}', "digest"),
        ('image.pullPolicy="Sometimes"', "pullPolicy"),
        ('watchNamespaces=["Team_A"]', "watchNamespaces"),
        ('watchNamespaces=["a", "a"]', "watchNamespaces"),
        ("operator.allow.everything=true", "everything"),
        ('operator.allow.capabilities=["sys_admin; rm"]', "capabilities"),
        ('operator.loglevel="debug"', "loglevel"),
        ('crds.keep="yes"', "keep"),
        ("rbac.nodeReader=true", "nodeReader"),
        ("networkPolicy.apiServerPorts=[0]", "apiServerPorts"),
        ("networkPolicy.apiServerPorts=[]", "apiServerPorts"),
        ('metrics.serviceMonitor.interval="often"', "interval"),
        ('resources.requests={"cpu": "lots"}', "resources"),
        ('nodeSelector={"a": 1}', "nodeSelector"),
        ('serviceAccount.name="Not A Name"', "name"),
    ],
)
def test_refused_with_the_name_of_the_field(helm: Helm, setting: str, named: str) -> None:
    with pytest.raises(HelmFailed, match=r"values don't meet the specifications") as failure:
        helm.template(setting)
    assert named in str(failure.value)


def test_namespaces_and_cluster_scope_exclude_each_other(helm: Helm) -> None:
    with pytest.raises(HelmFailed, match="watchNamespaces"):
        helm.template('scope="Cluster"', 'watchNamespaces=["a"]')


def test_a_parent_chart_may_pass_globals(helm: Helm) -> None:
    assert helm.template('global={"anything": 1}')


def objects(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every object with named properties in a schema, with its path."""
    found = [(path, schema)] if "properties" in schema and schema.get("type") == "object" else []
    for name, child in schema.get("properties", {}).items():
        found += objects(child, f"{path}.{name}")
    return found + (objects(schema["items"], f"{path}[]") if "items" in schema else [])


def test_schema_is_closed_everywhere_and_knows_every_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert [path for path, part in objects(schema) if part.get("additionalProperties") is not False] == []

    def undescribed(values: dict[str, Any], part: dict[str, Any], path: str = "") -> list[str]:
        known = part.get("properties")
        if known is None:
            return []
        missing = [f"{path}.{name}" for name in known.keys() ^ values.keys() if f"{path}.{name}" != ".global"]
        for name in known.keys() & values.keys():
            if isinstance(values[name], dict):
                missing += undescribed(values[name], known[name], f"{path}.{name}")
        return missing

    assert undescribed(yaml.safe_load((CHART / "values.yaml").read_text()), schema) == []
