"""Reading a model's file for a command."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from prebook_operator.api import Allow, DisaggregatedModel, FieldError, UserError, load
from prebook_operator.api.allow import NOTHING
from prebook_operator.api.load import parse
from prebook_operator.local.models import models_root

PACKAGED: Final = "pkg://"


def read_model(path: str, *, allow: Allow = NOTHING) -> DisaggregatedModel:
    """The checked model in the file at `path` (`-`: standard input).

    `pkg://NAME`, a model that `prebook model` prepares on this machine, becomes the folder that it is prepared in.
    Raises UserError.
    """
    return load(_with_folder(parse(read_text(path))), allow=allow)


def _with_folder(document: Mapping[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(dict(document))
    spec = made.get("spec")
    model = spec.get("model") if isinstance(spec, dict) else None
    uri = model.get("uri") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(uri, str) and uri.startswith(PACKAGED):
        model["uri"] = f"file://{models_root() / uri.removeprefix(PACKAGED)}"
    return made


def read_text(path: str) -> str:
    """Text of the file at `path` (`-`: standard input). Raises UserError."""
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError([FieldError("", "does not exist", "Check the path")], subject=path) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise UserError([FieldError("", f"cannot be read: {reason}", "Check the file")], subject=path) from None
