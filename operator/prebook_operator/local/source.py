"""From the file that the user names to the manifests that are run.

The file holds one DisaggregatedModel, or manifests that are already rendered, and any Secrets and ConfigMaps that
they refer to. ``pkg://NAME`` as a model's URI means a model that Prebook prepares itself; it is made first, and the
URI becomes the folder's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prebook_operator.local.errors import UserError
from prebook_operator.local.kube import Manifest

KIND = "DisaggregatedModel"
_EXTRAS = frozenset({"Secret", "ConfigMap"})
PeerSource = Callable[[str, int], str]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A file's documents: the model (None when the file is already rendered), the rest, and a digest of the whole."""

    path: Path
    name: str
    model: Manifest | None
    others: tuple[Manifest, ...]
    digest: str

    @property
    def model_uri(self) -> str:
        """``spec.model.uri``, or an empty string."""
        uri = _dig(self.model or {}, "spec", "model", "uri")
        return uri if isinstance(uri, str) else ""


def read_source(path: Path) -> Source:
    """Reads ``path``; raises ``UserError`` when it cannot be read or holds nothing that can be run."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not documents or not all(isinstance(document, dict) and "kind" in document for document in documents):
        raise UserError(f"{path} holds something that is not a Kubernetes object (no kind)")
    models = [document for document in documents if document["kind"] == KIND]
    others = tuple(document for document in documents if document["kind"] != KIND)
    if len(models) > 1:
        raise UserError(f"{path} holds {len(models)} {KIND} objects", remedy="put each into a file of its own")
    if models and (foreign := sorted({str(document["kind"]) for document in others} - _EXTRAS)):
        raise UserError(f"{path}: next to a {KIND} only Secret and ConfigMap are used, found {', '.join(foreign)}")
    if models:
        name = _dig(models[0], "metadata", "name")
    else:
        services = [d for d in others if d["kind"] == "Service" and _dig(d, "spec", "clusterIP") != "None"]
        name = _dig(services[0], "metadata", "name") if services else None
    if not isinstance(name, str):
        raise UserError(f"{path} holds no {KIND} with a name, and no rendered manifests with a front Service")
    return Source(
        path=path,
        name=name,
        model=models[0] if models else None,
        others=others,
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def resolve_model(source: Source, *, progress: Progress) -> Source:
    """Prepares a ``pkg://`` model and checks that a ``file://`` one exists. May take minutes the first time.

    Raises ``UserError`` with a remedy when there is no such model or folder.
    """
    uri = source.model_uri
    if uri.startswith("pkg://"):
        from prebook_operator.local.models import ModelError, ensure_model

        try:
            folder = ensure_model(uri.removeprefix("pkg://"), progress=progress)
        except ModelError as error:
            raise UserError(f"spec.model.uri: {error}") from error
        return _with_uri(source, uri=f"file://{folder}")
    if uri.startswith("file://"):
        folder = Path(uri.removeprefix("file://"))
        if not folder.is_dir():
            raise UserError(
                f"spec.model.uri: the folder {folder} does not exist",
                remedy="`prebook model smollm2` prepares one; or name a folder that holds a Hugging Face model",
            )
        if not (folder / "config.json").is_file():
            raise UserError(
                f"spec.model.uri: {folder} holds no config.json", remedy="name the folder of a Hugging Face model"
            )
    return source


def render_source(source: Source, *, peer_source: PeerSource, timeline_dir: str | None = None) -> list[Manifest]:
    """The manifests to run, with the operator's own render code; ``timeline_dir`` gets per-request timelines.

    Raises ``UserError`` that names fields.
    """
    if source.model is None:
        return list(source.others)
    from prebook_operator.api.allow import Allow
    from prebook_operator.api.errors import UserError as FieldErrors
    from prebook_operator.api.load import load
    from prebook_operator.render import RenderContext, render

    try:
        model = load(source.model, allow=Allow())
        context = RenderContext(
            namespace="default", operator_image="local", bind_host="$(POD_IP)", peer_source=peer_source
        )
        manifests = render(model, context)
    except FieldErrors as error:
        raise UserError(f"{source.path}: {error}") from error
    return [*manifests, *_not_rendered(source.others, rendered=manifests)]


def _not_rendered(others: Sequence[Manifest], *, rendered: Sequence[Manifest]) -> list[Manifest]:
    taken = {(m["kind"], m["metadata"]["name"]) for m in rendered}
    return [m for m in others if (m["kind"], _dig(m, "metadata", "name")) not in taken]


def _with_uri(source: Source, *, uri: str) -> Source:
    model = json.loads(json.dumps(source.model))
    model["spec"]["model"]["uri"] = uri
    return Source(path=source.path, name=source.name, model=model, others=source.others, digest=source.digest)


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
