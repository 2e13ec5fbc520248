from __future__ import annotations

import random

from dlite_agent.nano.skill_words import SCRIPTS, foreign_word


def test_foreign_words_have_letters_of_no_list_and_letters_again_and_again() -> None:
    rng = random.Random(3)
    words = [foreign_word(rng) for _ in range(400)]
    assert {len(word) for word in words} == set(range(2, 10))
    listed = set("".join(SCRIPTS))
    assert 0.3 < sum(not set(word) & listed for word in words) / len(words) < 0.6
    assert sum(len(word) > 5 and len(set(word)) <= 2 for word in words) > 20
    assert all(word.isprintable() and word.strip() == word for word in words)
