"""Objects as YAML text for people and for kubectl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml


class _PlainDumper(yaml.SafeDumper):
    """YAML without anchors: people do not read them, and not every reader of manifests resolves them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """The objects as one YAML document each, keys in the order given."""
    documents = [
        yaml.dump(dict(item), Dumper=_PlainDumper, sort_keys=False, width=118, allow_unicode=True) for item in objects
    ]
    return "---\n".join(documents)
