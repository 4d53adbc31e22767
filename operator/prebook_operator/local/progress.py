"""What an engine's log says about its start, and what to do when it failed. Pure text work, no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# "(EngineCore pid=12) INFO 11-29 20:51:02 [cpu_worker.py:88] text", with or without parts of it.
_PREFIX = re.compile(
    r"^(?:\([\w ]+ pid=\d+\)\s*)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+)?"
    r"(?:\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\s+)?"
    r"(?:\[[\w./-]+:\d+\]\s*)?"
)

# The newest telling line decides; the order here only matters within one line.
_STAGES: tuple[tuple[str, str], ...] = (
    (r"non-default args|vLLM (API server )?version|Resolved architecture", "reading the model's configuration"),
    (r"Application startup complete|Starting vLLM (API )?server|Uvicorn running", "engine up, waiting for its probe"),
    (r"init engine .* took", "engine initialized"),
    (r"Creating v1 connector|Initializing NIXL|Registering KV_Caches", "setting up the KV transfer"),
    (r"KV cache size|Available KV cache|kv cache", "allocating the KV cache"),
    (r"[Ww]arm(ing)? ?up|Capturing|torch\.compile|Compil", "warming up"),
    (r"Loading weights took|Model loading took", "weights loaded"),
    (r"Loading (safetensors|pt) checkpoint|Starting to load model|Loading (model )?weights", "loading model"),
    (r"Initializing (an? )?(V1 )?LLM engine|EngineCore", "starting the engine"),
)
_COMPILED_STAGES = tuple((re.compile(pattern), name) for pattern, name in _STAGES)

_NOISE = re.compile(
    r"See root cause above|Engine core initialization failed|raise |^\s*(File|\^|~)|Traceback|During handling"
    r"|direct cause"
)
_ERROR = re.compile(
    r"^\s*(?:[\w.]+\.)?\w*(?:Error|Exception)\b(?::|$)|error:|cannot start|Killed|No module named|^\[prebook\]"
)

_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"No module named '?(vllm|torch|nixl)",
        "install the engine: pip install 'prebook[engine]' (or vllm and nixl on a GPU machine)",
    ),
    (r"No module named '?prebook_connector", "install Prebook itself into this environment: pip install prebook"),
    (
        r"unrecognized arguments|error: argument|invalid choice",
        "correct spec.engine.args: this vLLM does not take that flag",
    ),
    (
        r"No available memory for the cache blocks|KV cache is needed|larger than the available KV cache",
        "raise VLLM_CPU_KVCACHE_SPACE in spec.engine.env, or lower --max-model-len in spec.engine.args",
    ),
    (
        r"out of memory|OutOfMemory|Cannot allocate memory|std::bad_alloc",
        "free memory, or run fewer replicas or a smaller model",
    ),
    (r"[Aa]ddress already in use", "another process holds the port: `prebook ps`, or `ss -ltnp` for others"),
    (
        r"max_model_len|max_position_embeddings",
        "lower --max-model-len in spec.engine.args to what the model supports",
    ),
    (
        r"Repo id must be|not a valid model identifier|does not appear to have a file named|Can't load the config"
        r"|Invalid repository ID|No such file or directory: .*config\.json",
        "check spec.model.uri: the folder must hold a Hugging Face model (config.json, weights, tokenizer)",
    ),
    (
        r"401 Client Error|gated repo|Access to model",
        "set spec.model.hfTokenSecretRef and add that Secret to the file",
    ),
    (
        r"ImportError|undefined symbol",
        "the Python environment is inconsistent: reinstall with pip install 'prebook[engine]'",
    ),
)
_COMPILED_REMEDIES = tuple((re.compile(pattern), text) for pattern, text in _REMEDIES)
_BY_STATUS = {
    127: "the command was not found: install the engine into the environment that runs prebook",
    137: "it was killed, most likely because memory ran out: run fewer replicas, or lower VLLM_CPU_KVCACHE_SPACE",
}


def clean(line: str, *, width: int = 160) -> str:
    """A log line without colours and without vLLM's own prefix, cut to ``width`` characters."""
    text = _PREFIX.sub("", _ANSI.sub("", line).strip())
    return text if len(text) <= width else text[: width - 1] + "…"


def stage(lines: Sequence[str]) -> str:
    """What the engine is doing, from its newest telling line; an empty string when no line tells."""
    for line in reversed(lines):
        match = _PREFIX.match(_ANSI.sub("", line).strip())
        if match is not None and match.group("level") == "WARNING":
            continue  # warnings speak of what could be, such as compilation
        for pattern, name in _COMPILED_STAGES:
            if pattern.search(line):
                return name
    return ""


def useful_tail(lines: Sequence[str], *, count: int = 8) -> list[str]:
    """The lines that explain a crash: the errors that name a cause, else simply the last ones. Oldest first, no
    repeats.
    """
    cleaned = [text for line in lines if (text := clean(line, width=400))]
    errors: list[str] = []
    for text in cleaned:
        if _ERROR.search(text) and not _NOISE.search(text) and text not in errors:
            errors.append(text)
    return (errors or cleaned)[-count:]


def remedy(lines: Sequence[str], *, exit_status: int | None) -> str:
    """What to do about a crash; points to the whole log when nothing is recognized."""
    for line in reversed(useful_tail(lines, count=20)):
        for pattern, text in _COMPILED_REMEDIES:
            if pattern.search(line):
                return text
    if exit_status in _BY_STATUS:
        return _BY_STATUS[exit_status]
    return "read the whole log (path above)"
