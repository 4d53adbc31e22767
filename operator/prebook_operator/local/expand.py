"""Text of a pod spec → text that is right on this machine: ``$(VAR)`` references and mount paths. Pure.

References follow the rule of the Kubernetes API (Container.args, EnvVar.value): ``$(NAME)`` is replaced when NAME is
known, left as it is otherwise, and ``$$`` stands for one dollar sign. Paths are replaced only at path boundaries:
with a volume at /run/prebook, ``/run/prebook/x.sock`` changes and ``/run/prebook-other`` or ``/var/run/prebook``
does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_REFERENCE = re.compile(r"\$\$|\$\(([^()]*)\)")
# What may stand before a path: not a character of a longer path, except the two slashes of a URI's empty authority
# (file:///run/…).
_BEFORE = r"(?:(?<![A-Za-z0-9_.\-/~])|(?<=://))"
_AFTER = r"(?![A-Za-z0-9_.\-])"


def expand_references(text: str, *, variables: Mapping[str, str]) -> str:
    """``text`` with every known ``$(NAME)`` replaced; unknown ones stay."""

    def replace(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return _REFERENCE.sub(replace, text)


def path_rewriter(mounts: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces each mount path (key) by its folder (value) wherever it stands as a whole path or as
    a prefix of one.

    The longest mount wins, and what was put in is never looked at again.
    """
    cleaned = {path.rstrip("/"): folder.rstrip("/") for path, folder in mounts.items() if path.rstrip("/")}
    if not cleaned:
        return lambda text: text
    alternatives = "|".join(re.escape(path) for path in sorted(cleaned, key=len, reverse=True))
    pattern = re.compile(f"{_BEFORE}({alternatives}){_AFTER}")
    return lambda text: pattern.sub(lambda match: cleaned[match.group(1)], text)
