"""What is served is what training computes, and where it is not somebody hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.block import BlockDrafter
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.drafter_ends import DrafterEnds
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import tiny_config, tiny_qwen3
from dlite_agent.training.capture import Transcript, capture
from dlite_agent.training.dspark import DSparkLearner
from dlite_agent.training.evaluate import Turn, check_served, serve
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import DLiteLearner
from dlite_agent.training.measure import measure
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, simulate
from dlite_agent.training.sources import StoredRecords
from dlite_agent.training.student import Student
from dlite_agent.training.trainer import Trainer
from dlite_agent.training.windows import StoredWindows, Windows
from tests.dlite_models import dlite_config

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0)


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64", config=tiny_config(vocab_size=64, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def turns(target: DenseTransformer) -> list[Turn]:
    """Greedy answers of a random model, which soon repeat themselves."""
    found = []
    for start in range(6):
        prompt = [(7 * start + 3 * step) % 64 for step in range(5 + 3 * start)]
        session = Session(target, NullDrafter(), session_id="plain")
        session.sync(prompt)
        limits = StopRules(frozenset(), 24 + start)
        for _ in session.decode(Sampler(GREEDY, KeyedNoise(0)), limits):
            pass
        found.append(Turn(prompt, session.token_ids[len(prompt) :]))
        session.close()
    return found


@pytest.fixture(scope="module")
def trained(
    target: DenseTransformer, turns: list[Turn], tmp_path_factory: pytest.TempPathFactory
) -> tuple[DLiteLearner, Records]:
    config = dlite_config(target.config, rank=16, intermediate_size=64)
    parts = [
        capture(target, Transcript.of_turn(turn.prompt_ids, turn.answer_ids), config.taps)
        for turn in turns
    ]
    records = Records.join([part for part in parts if part is not None])
    options = AlignOptions(steps=30, batch_size=32, learning_rate=4e-3, autocast=False)
    learner = DLiteLearner(config, FrozenEnds.of(target))
    trainer = Trainer(tmp_path_factory.mktemp("run"), learner, options)
    trainer.run(StoredRecords(records, options, 7))
    return learner, records


def test_served_rounds_are_those_that_training_computes(
    target: DenseTransformer, turns: list[Turn], trained: tuple[DLiteLearner, Records]
) -> None:
    learner, records = trained
    weights = {name: tensor.detach() for name, tensor in learner.weights.items()}
    ends = FrozenEnds.of(target)
    computed = simulate(Student(learner.config, weights, ends.embed), ends, records)
    rounds = serve(target, DLiteDrafter(learner.config, weights, target, shortlist=None), turns)
    assert rounds.num_different == 0
    served = rounds.acceptance(7)
    assert served.num_tokens == sum(len(turn.answer_ids) - 1 for turn in turns)
    assert computed.num_tokens == served.num_tokens
    assert 1.2 < served.tau < 8.0
    check_served(computed, served)
    long = rounds.acceptance(7, min_prompt=17)
    assert long.num_tokens == 27 + 28


def test_dspark_is_served_as_it_was_trained(
    target: DenseTransformer, turns: list[Turn], tmp_path: Path
) -> None:
    config = BlockConfig.for_target(
        target.config, "", taps=(0, 1), num_layers=1, intermediate_size=64, rank=8
    )
    captured = [
        capture(target, Transcript.of_turn(turn.prompt_ids, turn.answer_ids), (0, 1), first_row=0)
        for turn in turns
    ]
    windows = Windows.of([rows for rows in captured if rows is not None])
    learner = DSparkLearner(config, (0, 1), FrozenEnds.of(target))
    options = AlignOptions(steps=25, batch_size=32, learning_rate=1e-2, autocast=False)
    Trainer(tmp_path, learner, options).run(StoredWindows(windows, options, 7, anchors=16))
    computed = measure(learner, windows)
    weights = {name: weight.detach().double() for name, weight in learner.weights.items()}
    drafter = BlockDrafter(config, weights.__getitem__, DrafterEnds.of(target), shortlist=None)
    rounds = serve(target, drafter, turns)
    assert computed.tau > 1.1
    check_served(computed, rounds.acceptance(7))


def test_slots_that_are_off_by_one_are_found_out(
    target: DenseTransformer, turns: list[Turn], trained: tuple[DLiteLearner, Records]
) -> None:
    learner, records = trained
    computed = simulate(learner.student, FrozenEnds.of(target), records)
    weights = {name: tensor.detach().clone() for name, tensor in learner.weights.items()}
    weights["slot_embedding.weight"] = weights["slot_embedding.weight"].roll(1, 0)
    rounds = serve(target, DLiteDrafter(learner.config, weights, target), turns)
    assert rounds.num_different == 0
    with pytest.raises(DrafterMismatchError, match=r"slot \d is accepted in .* alignment"):
        check_served(computed, rounds.acceptance(7))


def test_two_points_are_allowed_and_not_more() -> None:
    def of(*shares: float, num_rounds: int = 1000) -> Acceptance:
        return Acceptance(2.0, shares, num_rounds, 2 * num_rounds)

    check_served(of(0.80, 0.60), of(0.81, 0.59))
    check_served(of(0.80, 0.60), of(0.72, 0.60, num_rounds=20))  # two rounds
    with pytest.raises(DrafterMismatchError, match=r"slot 1 is accepted in 0\.570"):
        check_served(of(0.80, 0.60), of(0.81, 0.57))


def test_answer_that_is_not_the_targets_is_counted(target: DenseTransformer) -> None:
    rounds = serve(target, NullDrafter(), [Turn([1, 2, 3], [4, 4, 4])])
    assert rounds.num_different == 1
    assert torch.equal(rounds.accepted, torch.tensor([0, 0]))
