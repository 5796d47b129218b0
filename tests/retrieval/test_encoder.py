from __future__ import annotations

import hashlib
import subprocess
import sys
from math import log, log1p, sqrt

import numpy as np
import pytest

from moopd.retrieval.encoder import E5Encoder, HashingEncoder
from moopd.retrieval.words import index_words, split_words, stem
from tests.retrieval.support import world


def test_words_are_lower_case_without_accents_or_punctuation():
    assert split_words("Beyoncé's 2nd ALBUM — Straße") == [
        "beyonce",
        "s",
        "2nd",
        "album",
        "strasse",
    ]


def test_index_words_are_stems_without_stop_words():
    assert index_words("Who released the Rivers?") == ["releas", "river"]
    assert [stem(w) for w in ("release", "releases", "released", "releasing")] == ["releas"] * 4
    assert [stem(w) for w in ("glass", "virus", "red", "sing", "2nds")] == [
        "glass",
        "virus",
        "red",
        "sing",
        "2nds",
    ]
    assert index_words("The Who") == ["the", "who"]


def test_hashing_inner_products_by_hand():
    # Features in a huge space (no collisions): words and pairs of neighbours x 0.3, no idf.
    # "x y x": x twice 1+ln2, y 1, pairs xy 0.3, yx 0.3; "x z": x 1, z 1, pair xz 0.3.
    encoder = HashingEncoder(200_003)
    left, right = encoder.encode_passages(["x y of the X", "X, z!"])
    norm_left = sqrt((1 + log(2)) ** 2 + 1 + 2 * 0.09)
    norm_right = sqrt(2 + 0.09)
    assert left @ left == pytest.approx(1.0, abs=1e-6)
    assert left @ right == pytest.approx((1 + log(2)) / (norm_left * norm_right), abs=1e-6)


def test_idf_by_hand(tmp_path):
    # Three documents; x in 3, u and v and w in 1: idf = ln(1 + (N - df + 0.5) / (df + 0.5)).
    encoder = HashingEncoder(200_003)
    encoder.fit(["x u", "x v", "x w"])
    idf_x, idf_u = log1p(0.5 / 3.5), log1p(2.5 / 1.5)
    one, two = encoder.encode_passages(["x u", "x v"])
    # The norm of each: x, its own word, its own pair (0.3 x idf of a pair seen once).
    squared = idf_x**2 + idf_u**2 + (0.3 * idf_u) ** 2
    assert one @ two == pytest.approx(idf_x**2 / squared, abs=1e-6)
    encoder.save(tmp_path)
    again = HashingEncoder(200_003)
    again.load(tmp_path)
    np.testing.assert_array_equal(again.encode_queries(["x u"])[0], one)
    # A word that no passage has matches nothing and does not weaken the rest.
    np.testing.assert_array_equal(again.encode_queries(["unheard x u"])[0] > 0, one > 0)
    assert not again.encode_queries(["unheard"]).any()


def test_hashing_is_the_same_in_another_process_and_batch():
    texts = [passage.text for passage in world()[0][:50]]
    code = (
        "import sys, hashlib; from moopd.retrieval.encoder import HashingEncoder;"
        "sys.stdout.write(hashlib.sha256("
        "HashingEncoder(64).encode_passages(sys.argv[1:]).tobytes()).hexdigest());"
        "assert 'torch' not in sys.modules and 'faiss' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *texts], capture_output=True, text=True, check=True
    )
    whole = HashingEncoder(64).encode_passages(texts)
    assert done.stdout == hashlib.sha256(whole.tobytes()).hexdigest()
    single = np.concatenate([HashingEncoder(64).encode_passages([text]) for text in texts])
    np.testing.assert_array_equal(whole, single)


def test_hashing_finds_the_fact_by_entity_and_relation():
    passages, queries = world()
    encoder = HashingEncoder(512)
    encoder.fit(p.text for p in passages)
    vectors = encoder.encode_passages([p.text for p in passages])
    scores = encoder.encode_queries([query for query, _ in queries]) @ vectors.T
    best = np.argsort(-scores, axis=1)[:, :3]
    found = [
        wanted in [passages[i].id for i in row]
        for row, (_, wanted) in zip(best, queries, strict=True)
    ]
    assert np.mean(found) >= 0.99
    first = [passages[row[0]].id == wanted for row, (_, wanted) in zip(best, queries, strict=True)]
    assert np.mean(first) >= 0.95


def test_text_without_words_has_no_direction():
    assert not HashingEncoder(64).encode_queries(["?!", ""]).any()
    assert HashingEncoder(64).encode_queries([]).shape == (0, 64)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A random two-layer BERT with a word vocabulary, saved as a transformers folder."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from moopd.retrieval.probe import _PAIRS

    folder = tmp_path_factory.mktemp("bert")
    texts = [text for pair in _PAIRS for text in pair] + [p.text for p in world()[0]]
    words = dict.fromkeys(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":", ".", "?"]
        + [word for text in texts for word in split_words(text)]
    )
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = BertModel(config)
    # Positions of a random model are noise; without them it is about a bag of words.
    model.embeddings.position_embeddings.weight.data.zero_()
    model.save_pretrained(folder)
    return folder


def test_e5_pools_over_the_mask_with_its_prefixes(bert):
    import torch
    from transformers import AutoModel, AutoTokenizer

    encoder = E5Encoder(str(bert), batch_size=2)
    texts = ["silver harbor", "the director of silver harbor is anna keller", "anna"]
    got = encoder.encode_passages(texts)
    model, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    for text, vector in zip(texts, got, strict=True):
        # One text alone has no padding: its mean is over all its tokens, [CLS] and [SEP] too.
        ids = tokenizer("passage: " + text, return_tensors="pt")
        with torch.inference_mode():
            mean = model(**ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-6)
    assert got.dtype == np.float32 and got.shape == (3, 128)
    assert not np.allclose(encoder.encode_queries(texts), got, atol=1e-2)


def test_e5_cuts_at_its_longest_input(bert):
    encoder = E5Encoder(str(bert), max_tokens=512)
    assert encoder.fingerprint["max_tokens"] == 64
    assert np.isfinite(encoder.encode_queries(["silver " * 300])).all()


def test_e5_fingerprint_follows_weights_and_not_the_place(bert, tmp_path):
    import shutil

    from safetensors.numpy import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(bert, copy)
    assert E5Encoder(str(copy)).fingerprint == E5Encoder(str(bert)).fingerprint
    weights = load_file(copy / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + np.float32(1e-3)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    changed = E5Encoder(str(copy)).fingerprint
    original = E5Encoder(str(bert)).fingerprint
    assert {k for k in changed if changed[k] != original[k]} == {"weights_sha256"}
    other = E5Encoder(str(bert), query_prefix="").fingerprint
    assert {k for k in other if other[k] != original[k]} == {"query_prefix"}


def test_e5_builds_and_opens_an_index(bert, tmp_path):
    from moopd.config import RetrievalConfig
    from moopd.retrieval.build import build_index, open_retriever
    from tests.retrieval.support import write_corpus

    passages, _ = world()
    corpus = write_corpus(tmp_path / "c.jsonl", passages)
    config = RetrievalConfig.model_validate(
        {"encoder": {"kind": "e5", "model": str(bert), "max_tokens": 64}, "shard_size": 150}
    )
    built = build_index(config, corpus, tmp_path / "index")
    assert built["encoder"]["pooling"] == "mean over the mask, l2"
    found = open_retriever(config, tmp_path / "index").search([p.text for p in passages[:40]], 3)
    assert [hits[0].id for hits in found] == [p.id for p in passages[:40]]
