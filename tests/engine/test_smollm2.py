"""The real model of tests and benches: SmolLM2-135M-Instruct, a llama in GGUF format, from PyPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.chat.renderer import Renderer
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.engine import Engine
from dlite_agent.gguf_tokenizer import gguf_tokenizer
from dlite_agent.models.gguf_config import from_stored_order, stored_name
from dlite_agent.models.gguf_file import GGUFFile
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import load_target, resolve_checkpoint
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
QUESTION = (Message("user", "What is the capital of France?"),)


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> CheckpointTokenizer:
    return load_tokenizer(str(resolve_checkpoint(smollm2)))


@pytest.fixture(scope="module")
def target(smollm2: str) -> Iterator[DenseTransformer]:
    with load_target(smollm2, dtype="float32", device="cpu", max_kv_bytes=2**28) as target:
        yield target


def oracle(target: DenseTransformer, smollm2: str) -> LlamaForCausalLM:
    """transformers' model with the same dequantised weights."""
    config = target.config
    file = GGUFFile(resolve_checkpoint(smollm2), smollm2)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            max_position_embeddings=config.max_position_embeddings,
        )
    ).eval()
    weights = {
        name: from_stored_order(file, name, file.read(stored_name(name)), config.head_dim)
        for name in weight_shapes(config)
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


@pytest.mark.parametrize("num_tokens", [16, pytest.param(64, marks=pytest.mark.soak)])
def test_greedy_tokens_are_those_of_transformers(
    target: DenseTransformer, tokenizer: CheckpointTokenizer, smollm2: str, num_tokens: int
) -> None:
    prompt = Renderer(tokenizer).render(QUESTION, (), template_kwargs={}).token_ids
    ids, got = torch.tensor(prompt), []
    with target.new_cache() as kv:
        while len(got) < num_tokens:
            output = target.forward(ids, kv, logits_for=[len(ids) - 1])
            kv.commit(len(ids))
            ids = output.logits[0].argmax().view(1)
            got.append(int(ids))
    with torch.no_grad():  # one forward over all: each token is the best one behind those before
        logits = oracle(target, smollm2)(torch.tensor([[*prompt, *got]])).logits[0]
    assert got == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert "Paris" in tokenizer.decode(got)


def test_template_without_tools_and_thoughts_renders_as_by_transformers(
    tokenizer: CheckpointTokenizer, smollm2: str
) -> None:
    theirs = gguf_tokenizer(resolve_checkpoint(smollm2))
    renderer = Renderer(tokenizer)
    conversations = [
        QUESTION,
        (Message("system", "Be brief."), *QUESTION),
        (*QUESTION, Message("assistant", "Paris."), Message("user", "And of\n\n  Spain? 12345")),
    ]
    for messages in conversations:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        wanted = theirs.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
        prompt = renderer.render(messages, (), template_kwargs={})
        assert list(prompt.token_ids) == list(wanted)
        assert not prompt.starts_in_reasoning
        assert "<think>" not in tokenizer.decode(prompt.token_ids)


def test_digits_are_seen_alone_as_the_model_was_trained(tokenizer: CheckpointTokenizer) -> None:
    ids = tokenizer.encode_untrusted("12345 x67")
    assert [tokenizer.token_bytes(token) for token in ids] == [
        *b"1 2 3 4 5".split(),
        b" x",
        b"6",
        b"7",
    ]


def test_text_survives_but_for_the_bytes_that_the_vocabulary_lacks(
    tokenizer: CheckpointTokenizer,
) -> None:
    text = "def f(x):\n\treturn x*2  # na\u00efve \u4e2d\u6587 \U0001f9d1 \x00\x7f"
    assert tokenizer.decode(tokenizer.encode_untrusted(text)) == text
    assert tokenizer.decode(tokenizer.encode_untrusted("a\x04b")) == "ab"


def test_engine_talks_to_it_and_reuses_the_turn_before(smollm2: str) -> None:
    config = EngineConfig(model=smollm2, dtype="float32", max_kv_bytes=2**28)
    with Engine(config) as engine:
        first = engine.generate(ChatRequest(QUESTION, sampling=GREEDY))
        again = (*QUESTION, first.message, Message("user", "And of Italy?"))
        second = engine.generate(ChatRequest(again, sampling=GREEDY))
    assert first.message.content == "The capital of France is Paris."
    assert not first.message.reasoning
    assert not first.message.tool_calls
    assert first.finish_reason == "stop"
    assert "Rome" in second.message.content
    assert second.stats.cached_tokens > 40
