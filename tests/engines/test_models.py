"""Rules: a turn ends with the token the chat template ends it with; only safe weight files load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moopd.engines.models import ModelError, check_same_vocabulary, load_policy
from moopd.trainers.checkpoints import save_policy
from tests.support import tiny_policy, word_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def chatml_tokenizer() -> Any:
    """As a GGUF conversion of SmolLM2 leaves it: ends with <|im_start|>, no padding."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", None
    tokenizer.chat_template = CHATML
    return tokenizer


def test_a_chatml_model_ends_and_pads_with_im_end(tmp_path: Path) -> None:
    tokenizer = chatml_tokenizer()
    save_policy(tiny_policy(tokenizer), tokenizer, tmp_path / "m")
    _, loaded = load_policy(str(tmp_path / "m"))
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.pad_token == "<|im_end|>"


def test_another_chat_format_keeps_its_own_end(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    save_policy(tiny_policy(tokenizer), tokenizer, tmp_path / "m")
    _, loaded = load_policy(str(tmp_path / "m"))
    assert (loaded.eos_token, loaded.pad_token) == ("[eos]", "[pad]")


def test_dtype_and_weights_arrive_as_saved(tmp_path: Path) -> None:
    model = tiny_policy(word_tokenizer())
    save_policy(model, word_tokenizer(), tmp_path / "m")
    loaded, _ = load_policy(str(tmp_path / "m"))
    again = dict(loaded.named_parameters())
    assert all(torch.equal(again[name], value) for name, value in model.named_parameters())
    assert not loaded.training
    assert load_policy(str(tmp_path / "m"), "bfloat16")[0].dtype is torch.bfloat16


def test_pickled_weights_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no \*.safetensors"):
        load_policy(str(tmp_path))
    with pytest.raises(ModelError, match="no GGUF file"):
        load_policy(str(tmp_path / "m.gguf"))


def test_vocabularies_of_student_and_teacher_must_agree() -> None:
    student, teacher = tiny_policy(word_tokenizer()), tiny_policy(word_tokenizer())
    check_same_vocabulary(student, teacher)
    teacher.config.vocab_size = 152_064
    with pytest.raises(ModelError, match=rf"student {student.config.vocab_size}.*teacher 152,064"):
        check_same_vocabulary(student, teacher)
