"""The policy of scale tiny: a from-scratch Qwen3-shaped model and a word-level tokenizer."""

from __future__ import annotations

from typing import Any

from moopd.config import ModelConfig
from moopd.data.world_words import vocabulary
from moopd.roles.parsing import ACTION_TAGS
from moopd.roles.prompts import compact_words

_REPORT_NUMBERS = tuple(str(number) for number in range(1, 21))
_CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} "
    "{% if m.role == 'assistant' %}[end] {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_tokenizer() -> Any:
    """One token a word. Control tokens are added tokens, so no text can spell one.

    Action tags are plain words: the policy writes them, prompts show them neutralised.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tags = [text for tags in ACTION_TAGS.values() for t in tags for text in (f"<{t}>", f"</{t}>")]
    words = dict.fromkeys(
        ["[unk]", *tags, *_REPORT_NUMBERS, "0", "good", "none", *compact_words(), *vocabulary()]
    )
    ids = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(ids, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[unk]",
        eos_token="[end]",
        pad_token="[pad]",
        additional_special_tokens=["[user]", "[assistant]"],
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def build_tiny(config: ModelConfig, seed: int) -> tuple[Any, Any]:
    """(untrained model, tokenizer); the weights depend on `seed` alone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer()
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.hidden_size * 5 // 2,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_position_embeddings=2048,
        initializer_range=config.init_std,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
    return model.eval(), tokenizer
