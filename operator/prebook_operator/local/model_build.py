"""Child process of :mod:`prebook_operator.local.models`: does what needs torch and transformers, then ends.

``python -m prebook_operator.local.model_build '{"name": …, "out": FOLDER, "gguf": FILE}'``. Lines on stdout that start
with ``::`` are progress for the user.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from prebook_operator.local.model_recipes import MARKER, SMOLLM2, Recipe, TinySpec, recipe_for

#: Text that the tiny model's tokenizer is trained on; any text does, it only has to stay the same.
_CORPUS = (
    "A prefill engine computes the keys and values of a prompt; a decode engine continues from them.",
    "The destination is booked before the payload exists, so the transfer overlaps the computation.",
    "Paris is the capital of France. Rome is the capital of Italy. Vienna is the capital of Austria.",
    "0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100 1000 10000",
)
_VOCABULARY = 512
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TINY_MAX_POSITIONS = 32768


def main(argv: list[str]) -> int:
    """Builds the folder that the JSON argument describes; exceptions end the process with a traceback."""
    arguments: dict[str, str] = json.loads(argv[1])
    recipe = recipe_for(arguments["name"])
    out = Path(arguments["out"])
    _say("importing transformers (slow the first time)")
    if recipe.tiny is None:
        build_smollm2(Path(arguments["gguf"]), out=out)
    else:
        build_tiny(recipe.tiny, out=out)
    write_marker(out, recipe=recipe)
    return 0


def build_smollm2(gguf: Path, *, out: Path) -> None:
    """Unpacks the pinned GGUF file into a bfloat16 Hugging Face folder with tokenizer and chat template."""
    _check_sha256(gguf, expected=SMOLLM2.sha256)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _quiet()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise RuntimeError(f"{gguf.name} carries no chat template")
    tokenizer.model_max_length = 8192
    _say("unpacking the weights to bfloat16 (half a minute)")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    _say("writing the folder")
    _save(model, tokenizer=tokenizer, out=out)


def build_tiny(spec: TinySpec, *, out: Path) -> None:
    """Makes a random model of the given shape, the same weights for the same spec."""
    import torch
    from transformers import Olmo3Config, Olmo3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    _quiet()
    torch.manual_seed(spec.seed)
    shape: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": spec.hidden,
        "intermediate_size": 3 * spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.kv_heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": _TINY_MAX_POSITIONS,
        "initializer_range": 0.05,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": spec.dtype,
    }
    if spec.window:
        # vLLM's Qwen3 has no per-layer windows; Olmo3 has, and is the same kind of model otherwise.
        kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(spec.layers)]
        if spec.hidden != spec.kv_heads * spec.head_dim:
            shape |= {"hidden_size": spec.kv_heads * spec.head_dim, "intermediate_size": 3 * spec.hidden}
        model: Any = Olmo3ForCausalLM(Olmo3Config(**shape, sliding_window=spec.window, layer_types=kinds))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=spec.head_dim))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                # Sharp attention: with the default of 1 it is nearly uniform, and damaged KV would hardly show.
                parameter.fill_(2.0)
    model.to(getattr(torch, spec.dtype))
    _say(f"writing a random model, {spec.kv_bytes_per_token // 1024} KiB of KV a token")
    _save(model, tokenizer=_tiny_tokenizer(), out=out)


def _tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=_SPECIAL[0],
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=_TINY_MAX_POSITIONS,
    )


def _save(model: Any, *, tokenizer: Any, out: Path) -> None:
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
    path = out / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # The name that transformers 4 and 5 both know; "is_local" and the like describe this call, not the tokenizer.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_marker(folder: Path, *, recipe: Recipe) -> None:
    """Makes the folder readable for other users and writes the marker, which is what makes it count as finished."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        path.chmod(0o644)
    marker = {
        "identity": recipe.identity(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "files": {path.name: path.stat().st_size for path in files},
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _check_sha256(path: Path, *, expected: str) -> None:
    with path.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != expected:
        raise RuntimeError(f"checksum of {path.name} is {found}, expected {expected}: not converting it")
    _say("checksum verified")


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _say(text: str) -> None:
    print(f"::{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
