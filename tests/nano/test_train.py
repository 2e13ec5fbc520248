from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlite_agent.nano import corpus
from dlite_agent.nano.chatml import render, train_tokenizer
from dlite_agent.nano.export import export
from dlite_agent.nano.network import Network
from dlite_agent.nano.shape import NanoConfig
from dlite_agent.nano.train import Recipe, Trainer

CONFIG = NanoConfig(
    vocab_size=300,
    hidden_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["def total(a, b):\n    return a + b\n"] * 9
    tokenizer = train_tokenizer(texts, CONFIG.vocab_size)
    assert tokenizer.get_vocab_size() <= CONFIG.vocab_size
    return tokenizer


def test_forward_and_export_equal_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = Network(CONFIG, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1)
            parameter.copy_(parameter.bfloat16())
    export(network, CONFIG, tokenizer, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(40)[None] % CONFIG.vocab_size
    with torch.inference_mode():
        ours = network.logits(network.hidden(ids, torch.arange(40)[None]))
        torch.testing.assert_close(ours, theirs(input_ids=ids).logits, atol=1e-5, rtol=0)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi <b>"}]
    assert render(messages, add_generation_prompt=True) == loaded.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    text = "def total(a, b):\n"
    assert loaded(text).input_ids == tokenizer.encode(text).ids


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "POOL_ROWS", 8)
    monkeypatch.setattr(corpus, "COPY_ROWS", 16)
    recipe = Recipe(copy_tokens=2 * 16 * 64, world_tokens=10**9, compiled=False)
    whole = Trainer(tmp_path / "whole", recipe, CONFIG, tokenizer)
    whole.run(max_steps=4)
    parts = Trainer(tmp_path / "parts", recipe, CONFIG, tokenizer)
    parts.run(max_steps=3)
    again = Trainer(tmp_path / "parts", recipe, CONFIG, tokenizer)
    assert again.place == parts.place
    again.run(max_steps=1)
    assert again.place == whole.place
    for name, value in whole.network.state_dict().items():
        torch.testing.assert_close(again.network.state_dict()[name], value, atol=0, rtol=0)


def test_a_checkpoint_is_json_and_safetensors(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, Recipe(compiled=False), CONFIG, tokenizer)
    trainer.run(max_steps=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["place.json", "state-1.safetensors"]
    assert json.loads((tmp_path / "place.json").read_text())["step"] == 1


def test_the_run_ends_when_its_tokens_are_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = Recipe(copy_tokens=96 * 64, world_tokens=0, compiled=False)
    trainer = Trainer(tmp_path, recipe, CONFIG, tokenizer)
    assert trainer.run()
    assert trainer.place.step == 1


def test_first_weights_copy_a_repeated_segment() -> None:
    config = NanoConfig(vocab_size=500)
    network = Network(config, torch.Generator().manual_seed(1))
    segment = torch.randperm(500, generator=torch.Generator().manual_seed(2))[:24]
    ids = segment.repeat(3)[None]
    with torch.inference_mode():
        hidden = network.hidden(ids, torch.arange(72)[None])[0, 24:-1]
        guesses = network.logits(hidden).argmax(-1)
    assert (guesses == ids[0, 25:]).float().mean() > 0.8


def test_a_run_can_start_from_an_exported_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = Trainer(tmp_path / "first", Recipe(seed=5, compiled=False), CONFIG, tokenizer)
    export(first.network, CONFIG, tokenizer, tmp_path / "out")
    second = Trainer(tmp_path / "second", Recipe(compiled=False), CONFIG, tokenizer)
    second.start_from(tmp_path / "out")
    for name, value in first.network.state_dict().items():
        found = second.network.state_dict()[name]
        torch.testing.assert_close(found, value.bfloat16().float(), atol=0, rtol=0)


def test_a_rate_of_nothing_leaves_the_weights(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for rate, is_changed in ((0.0, False), (0.1, True)):
        recipe = Recipe(copy_tokens=0, world_tokens=10**9, rate=rate, compiled=False)
        trainer = Trainer(tmp_path / str(rate), recipe, CONFIG, tokenizer)
        before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
        trainer.run(max_steps=1)
        after = trainer.network.state_dict()
        assert is_changed == any(not torch.equal(after[name], before[name]) for name in before)
