"""Loading policies: transformers folders, hub names and GGUF files; safetensors only."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A model that cannot be used; the message says got, expected, what to do."""


def load_policy(source: str, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) from a folder, a hub name or a `.gguf` file.

    Remote code is never run; weights other than safetensors (and GGUF) are refused.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(source)
    options: dict[str, Any] = {"trust_remote_code": False}
    name = source
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no GGUF file at {path}; give an existing file in model.path")
        options["gguf_file"] = path.name
        name = str(path.parent)
    elif path.is_dir() and not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} holds no *.safetensors; expected a transformers folder")
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    loading = (
        {**options, **_whole_weights()}
        if path.suffix == ".gguf"
        else {**options, "use_safetensors": True}
    )
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), **loading)
    _repair_special_tokens(tokenizer)
    return model.to(device).eval(), tokenizer


def _whole_weights() -> dict[str, Any]:
    """Recent transformers keep GGUF weights quantized, which nothing can train or save."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def recompute_layers(model: Any) -> None:
    """Keep only what enters a layer while training, and run it again for its gradient: a long
    batch then needs a fraction of its memory, for a third more work and the same gradient."""
    # Renamed in transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def check_same_vocabulary(student: Any, teacher: Any) -> None:
    """Log-probabilities are compared token by token, so both must know the same tokens."""
    sizes = (int(student.config.vocab_size), int(teacher.config.vocab_size))
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"vocabularies differ: student {sizes[0]:,} tokens, teacher {sizes[1]:,}; "
            "on-policy distillation needs one vocabulary, choose models of one family"
        )


def _repair_special_tokens(tokenizer: Any) -> None:
    """ChatML models end a turn with <|im_end|>; some conversions name another token or no pad."""
    end = "<|im_end|>"
    if "<|im_start|>" in (tokenizer.chat_template or "") and end in tokenizer.get_vocab():
        tokenizer.eos_token = end
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
