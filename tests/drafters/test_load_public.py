"""Every dialect of public drafters loads, and the same tensors draft the same in each."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import DraftBlock, Drafter
from dlite_agent.drafters.load import explain_drafter, is_loaded_drafter, load_drafter, split_window
from dlite_agent.errors import (
    DrafterMismatchError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)
from dlite_agent.models.block_config import BlockConfig, block_shapes
from dlite_agent.models.block_files import write_block_drafter
from dlite_agent.models.drafter_source import read_block_drafter
from dlite_agent.models.eagle3_network import Eagle3Config, eagle3_shapes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import tiny_qwen3
from tests import drafter_folders as folders
from tests.block_models import block_config, block_weights, random_tensors

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93]
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0)
NUM_LAYERS = 8
TAPS = (1, 3, 4)


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(num_layers=NUM_LAYERS)


def block(target: DenseTransformer, **choices: object) -> tuple[BlockConfig, dict[str, Tensor]]:
    config = block_config(target.config, **({"taps": TAPS, "num_layers": 2} | choices))
    return config, {name: value.float() for name, value in block_weights(config).items()}


def eagle3(**choices: object) -> tuple[Eagle3Config, dict[str, Tensor]]:
    config = Eagle3Config(512, 64, TAPS, 4, 2, 16, 96, **choices)  # type: ignore[arg-type]
    tensors = random_tensors(eagle3_shapes(config))
    return config, {name: value.float() for name, value in tensors.items()}


def load(folder: str, target: DenseTransformer) -> Drafter:
    return load_drafter(folder, target, "any")


def draft(drafter: Drafter, target: DenseTransformer) -> DraftBlock:
    """What is drafted after a few rounds."""
    session = Session(target, drafter, session_id="one")
    session.sync(PROMPT)
    sampler = Sampler(GREEDY, KeyedNoise.derive(1, 0, PROMPT))
    list(session.decode(sampler, StopRules(frozenset(), 2)))
    state = session._state
    assert state.pending is not None
    drafted = drafter.propose(
        state.draft_state, state.pending, None, state.position, KeyedNoise(1), 7
    )
    session.close()
    return drafted


def about(block: DraftBlock) -> Any:
    """Equal to blocks whose confidence differs in its last bits, as tensors lie in memory."""
    confidence: Any = pytest.approx(block.confidence, abs=1e-5)
    return replace(block, confidence=confidence)


def drafts(folder: str, target: DenseTransformer) -> DraftBlock:
    return draft(load(folder, target), target)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_dspark_of_three_projects_drafts_alike(
    head: str, target: DenseTransformer, tmp_path: Path
) -> None:
    config, tensors = block(target, head=head, confidence="token")
    ends = folders.ends(target)
    first = folders.write_drafter(tmp_path / "a", folders.deepspec(config), tensors | ends)
    expected = about(drafts(first, target))
    assert len(expected.token_ids) == 7
    assert expected.source == "dspark"
    specforge = folders.zlab(config, "DSparkDraftModel")
    renamed = {
        (f"logit_head.{name}" if "head" in name else name): value for name, value in tensors.items()
    }
    assert drafts(folders.write_drafter(tmp_path / "b", specforge, renamed), target) == expected
    converted = folders.speculators(config, "dspark")
    verifier = {
        "verifier_lm_head.weight": ends["lm_head.weight"],
        "verifier_norm.weight": torch.ones(64),
    }
    folder = folders.write_drafter(tmp_path / "c", converted, tensors | ends | verifier)
    assert drafts(folder, target) == expected
    write_block_drafter(tmp_path / "d", config, tensors, {}, dtype=torch.float32)
    assert drafts(str(tmp_path / "d"), target) == expected


def test_dflash_of_two_alignments_and_three_projects(
    target: DenseTransformer, tmp_path: Path
) -> None:
    config, tensors = block(target, head="none", family="dflash")
    anchored = drafts(
        folders.write_drafter(tmp_path / "a", folders.deepspec(config), tensors), target
    )
    assert len(anchored.token_ids) == 7
    zlab = drafts(folders.write_drafter(tmp_path / "b", folders.zlab(config), tensors), target)
    assert zlab.source == anchored.source == "dflash"
    # the same states: slot 1 is the first draft of the one and the second of the other
    assert zlab.token_ids == anchored.token_ids[1:]
    converted = folders.speculators(config, "dflash")
    folder = folders.write_drafter(tmp_path / "c", converted, tensors)
    assert drafts(folder, target) == zlab
    folder = folders.write_drafter(
        tmp_path / "d", converted | {"sample_from_anchor": True}, tensors
    )
    assert drafts(folder, target) == anchored
    del converted["aux_hidden_state_layer_ids"]  # two layers: taps 1 and L - 3 by default
    two, two_tensors = block(target, head="none", family="dflash", taps=(1, 5))
    folder = folders.write_drafter(tmp_path / "e", folders.zlab(two), two_tensors)
    converted["transformer_layer_config"] = folders.layer_fields(two) | {"num_hidden_layers": 2}
    default = folders.write_drafter(tmp_path / "f", converted, two_tensors)
    assert drafts(folder, target) == drafts(default, target)


def test_layers_with_a_window_are_honoured(target: DenseTransformer, tmp_path: Path) -> None:
    config, tensors = block(target, head="none", family="dflash", windows=(4, 0))
    full, _ = block(target, head="none", family="dflash")
    windowed = drafts(folders.write_drafter(tmp_path / "a", folders.zlab(config), tensors), target)
    assert windowed != drafts(
        folders.write_drafter(tmp_path / "b", folders.zlab(full), tensors), target
    )


def test_dflash2_of_two_projects_drafts_alike(target: DenseTransformer, tmp_path: Path) -> None:
    config, tensors = block(
        target, head="selector", family="dflash2", conv_size=2, is_anchor_drafted=False,
        softcap=30.0, output_multiplier=0.5, embedding_scale=0.9,
    )  # fmt: skip
    zlab = folders.zlab(config, "DFlash2DraftModel")
    expected = about(drafts(folders.write_drafter(tmp_path / "a", zlab, tensors), target))
    assert (len(expected.token_ids), expected.source) == (6, "dflash2")
    converted = folders.speculators(config, "dflash2")
    folder = folders.write_drafter(tmp_path / "b", converted, tensors | folders.ends(target))
    assert drafts(folder, target) == expected


def test_reduced_vocabulary_of_a_block_drafter(target: DenseTransformer, tmp_path: Path) -> None:
    ids = torch.arange(0, 512, 4)
    config, tensors = block(target, draft_vocab_size=len(ids))
    maps = folders.vocabulary_maps(ids, 512)
    converted = folders.speculators(config, "dspark")
    folder = folders.write_drafter(tmp_path / "a", converted, tensors | maps)
    found = drafts(folder, target)
    assert len(found.token_ids) == 7
    assert set(found.token_ids) <= set(ids.tolist())


@pytest.mark.parametrize("vocabulary", ["whole", "reduced"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_eagle3_of_two_projects_drafts_alike(
    vocabulary: str, qk_norm: bool, target: DenseTransformer, tmp_path: Path
) -> None:
    ids = torch.arange(3, 512, 4)
    rows = len(ids) if vocabulary == "reduced" else 0
    config, tensors = eagle3(draft_vocab_size=rows, has_qk_norm=qk_norm, block_size=5)
    if rows:
        tensors |= folders.vocabulary_maps(ids, 512)
    folder = folders.write_drafter(
        tmp_path / "a", folders.eagle3_safeai(config), folders.midlayer(tensors)
    )
    expected = about(drafts(folder, target))
    assert (len(expected.token_ids), expected.source) == (5, "eagle3")
    if rows:
        assert set(expected.token_ids) <= set(ids.tolist())
    embedded = tensors | {"embed_tokens.weight": folders.ends(target)["embed_tokens.weight"]}
    folder = folders.write_drafter(tmp_path / "b", folders.eagle3_speculators(config), embedded)
    assert drafts(folder, target) == expected
    default = folders.eagle3_speculators(config) | {"eagle_aux_hidden_state_layer_ids": None}
    assert drafts(folders.write_drafter(tmp_path / "c", default, embedded), target) == expected
    if not rows:
        folder = folders.write_drafter(
            tmp_path / "d", folders.eagle3_deepspec(config), tensors | folders.ends(target)
        )
        assert drafts(folder, target) == expected


def test_residual_and_input_norms_of_eagle3_matter(
    target: DenseTransformer, tmp_path: Path
) -> None:
    found = []
    for number, choices in enumerate(({}, {"is_residual_normed": True}, {"is_input_normed": True})):
        config, tensors = eagle3(**choices)
        folder = tmp_path / str(number)
        found.append(
            drafts(
                folders.write_drafter(folder, folders.eagle3_speculators(config), tensors), target
            )
        )
    assert len({drafted.token_ids for drafted in found}) == 3


def test_own_embedding_and_head_of_eagle3_are_used_and_told(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = eagle3()
    aliased = folders.write_drafter(tmp_path / "a", folders.eagle3_safeai(config), tensors)
    own = {name: value + 1.0 for name, value in folders.ends(target).items()}
    folder = folders.write_drafter(tmp_path / "b", folders.eagle3_safeai(config), tensors | own)
    with caplog.at_level(logging.WARNING):
        assert drafts(folder, target) != drafts(aliased, target)
    assert "embed_tokens.weight" in caplog.text
    assert "lm_head.weight" in caplog.text


def broken(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name) if name in tensors else None


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("layers.1.mlp.down_proj.weight"), r"lacks 1 tensors.*layers\.1\.mlp\.down_proj"),
        (drop("fc.weight"), r"'fc\.weight' is missing"),
        (put("layers.0.self_attn.q_proj.bias", torch.ones(64)), r"q_proj\.bias'.*has not"),
        (put("norm.weight", torch.ones(32)), r"'norm\.weight' is \[32\], but should be \[64\]"),
        (put("norm.weight", torch.full((64,), torch.nan)), r"'norm\.weight' holds NaN"),
        (put("norm.weight", torch.ones(64, dtype=torch.int32)), "stored as I32"),
        (put("model.norm.weight", torch.ones(64)), "the same tensor"),
        (put("t2d", torch.ones(512)), "'t2d' is stored as F32"),
        (put("markov_head.markov_w2.weight", torch.ones(512, 9)), r"markov_w2\.weight' is"),
    ],
)
def test_tensor_that_is_wrong_is_named(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    target: DenseTransformer,
    tmp_path: Path,
) -> None:
    config, tensors = block(target)
    folders.write_drafter(tmp_path, folders.deepspec(config), tensors)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(broken(tmp_path, change), target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("d2t", torch.full((128,), 500)), "names ids outside"),
        (put("d2t", torch.zeros(128, dtype=torch.int64)), "name different ids"),
        (put("d2t", torch.zeros(99, dtype=torch.int64)), r"'d2t' is \[99\]"),
        (drop("d2t"), "lacks 1 tensors, the first is 'd2t'"),
        (put("midlayer.mlp.bias", torch.ones(64)), r"layers\.0\.mlp\.bias"),
    ],
)
def test_vocabulary_that_is_wrong_is_named(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    target: DenseTransformer,
    tmp_path: Path,
) -> None:
    config, tensors = eagle3(draft_vocab_size=128)
    tensors |= folders.vocabulary_maps(torch.arange(0, 512, 4), 512)
    folders.write_drafter(tmp_path, folders.eagle3_safeai(config), folders.midlayer(tensors))
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(broken(tmp_path, change), target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 128}, "hidden_size=128, and this one"),
        ({"vocab_size": 300}, "vocab_size=300"),
        ({"num_target_layers": 36}, "num_target_layers=36"),
        ({"target_layer_ids": [1, 3, 33]}, "output of layer 33"),
        ({"target_layer_ids": [-1, 3, 4]}, "output of layer -1.*embedding"),
        ({"mask_token_id": 512}, "masks with id 512"),
        ({"target_fingerprint": "f" * 16}, "fingerprint=ffff"),
    ],
)
def test_drafter_of_another_target_is_refused_with_the_reason(
    fields: dict[str, object], message: str, target: DenseTransformer, tmp_path: Path
) -> None:
    config, tensors = block(target)
    folder = folders.write_drafter(tmp_path, folders.deepspec(config) | fields, tensors)
    with pytest.raises(DrafterMismatchError, match=message):
        load(folder, target)


def test_copy_of_another_targets_head_is_refused(target: DenseTransformer, tmp_path: Path) -> None:
    config, tensors = block(target)
    theirs = folders.ends(tiny_qwen3(num_layers=NUM_LAYERS, seed=1))
    for name in theirs:
        ends = folders.ends(target) | {name: theirs[name]}
        folder = folders.write_drafter(tmp_path, folders.deepspec(config), tensors | ends)
        with pytest.raises(DrafterMismatchError, match=f"'{name}' of the target that it was"):
            load(folder, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "no drafter that is read here"),
        ({"speculators_model_type": "medusa"}, "'medusa'"),
        ({"architectures": ["DFlashDraftModel"], "projector_type": "domino"}, "domino"),
        ({"target_layer_ids": "all"}, "target_layer_ids='all'"),
        ({"block_size": 7.5}, "block_size=7.5"),
        ({"block_size": None}, "no 'block_size'"),
        ({"block_size": True}, "block_size=True"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head='yes'"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
        (
            {"architectures": ["DFlashDraftModel"], "sample_from_anchor": 1},
            "sample_from_anchor=1",
        ),
        (
            {"architectures": ["LlamaForCausalLMEagle3"], "use_aux_hidden_state": False},
            "EAGLE-1 and",
        ),
    ],
)
def test_config_that_is_not_read_is_refused(
    fields: dict[str, object], message: str, target: DenseTransformer, tmp_path: Path
) -> None:
    config, tensors = block(target, confidence="token")
    folder = folders.write_drafter(tmp_path, folders.deepspec(config) | fields, tensors)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(folder, target)


def test_eagle3_of_several_layers_is_refused(target: DenseTransformer, tmp_path: Path) -> None:
    config, tensors = eagle3()
    tensors["layers.1.input_layernorm.weight"] = torch.ones(64)
    folder = folders.write_drafter(tmp_path, folders.eagle3_speculators(config), tensors)
    with pytest.raises(UnsupportedCheckpointError, match="several layers"):
        load(folder, target)


def test_pickles_are_refused_with_advice(target: DenseTransformer, tmp_path: Path) -> None:
    config, _ = block(target)
    (tmp_path / "config.json").write_text(json.dumps(folders.deepspec(config)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UnsupportedCheckpointError, match="convert them to safetensors"):
        load(str(tmp_path), target)


def test_missing_weights_and_wrong_names_are_told(target: DenseTransformer, tmp_path: Path) -> None:
    config, _ = block(target)
    (tmp_path / "config.json").write_text(json.dumps(folders.deepspec(config)))
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        load(str(tmp_path), target)
    with pytest.raises(ModelNotFoundError):
        load(str(tmp_path / "nothing"), target)
    with pytest.raises(UnsupportedCheckpointError, match="no drafter"):
        load("nano", target)


def test_window_is_part_of_a_name(target: DenseTransformer, tmp_path: Path) -> None:
    config, tensors = block(target)
    folder = folders.write_drafter(tmp_path, folders.deepspec(config), tensors)
    assert split_window(f"{folder}?window=16") == (folder, 16)
    wide, narrow = (load(f"{folder}?window={size}", target) for size in (100, 2))
    assert draft(wide, target) == drafts(folder, target)
    assert draft(narrow, target) != drafts(folder, target)
    assert explain_drafter(f"{folder}?window=16", target.config).startswith("dspark: ")
    assert is_loaded_drafter("deepseek-ai/dspark_qwen3_4b_block7")
    assert not is_loaded_drafter("suffix")
    for query in ("window=0", "window=x", "windows=3"):
        with pytest.raises(DrafterMismatchError, match="is no window"):
            load(f"{folder}?{query}", target)


def test_tensors_of_a_dspark_checkpoint_can_be_read(
    target: DenseTransformer, tmp_path: Path
) -> None:
    config, tensors = block(target)
    folder = folders.write_drafter(
        tmp_path / "a", folders.deepspec(config), tensors | folders.ends(target)
    )
    read, found = read_block_drafter(folder, target.config)
    assert read == config
    assert set(found) == set(block_shapes(config))
    assert torch.equal(found["fc.weight"], tensors["fc.weight"])
    eagle_config, eagle_tensors = eagle3()
    folder = folders.write_drafter(
        tmp_path / "b", folders.eagle3_safeai(eagle_config), eagle_tensors
    )
    with pytest.raises(UnsupportedCheckpointError, match="eagle3 drafter"):
        read_block_drafter(folder, target.config)
