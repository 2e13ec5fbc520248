"""Names of the world: projects, modules, functions and variables, split by a hash of each word.

A word belongs to exactly one split, so a held-out repository shares no project, module, function
or variable name with any repository that nano was trained on.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import Literal

__all__ = ["Split", "invent_word", "pick_words", "split_of_word", "words_of"]

Split = Literal["train", "heldout"]

_WORDS = """
account actor agenda album alarm anchor angle animal answer anvil apple apron arch arena armor
arrow artist atlas attic autumn badge bakery balance ballad bamboo banner barrel basin basket
battery beacon beaker bench berry bicycle blanket blossom board border bottle boulder bracket
branch brick bridge bronze bucket budget buffer bundle bureau butter button cabin cable cactus
camera campus canal candle canoe canvas canyon captain caravan cargo carpet carrot cart castle
cavern cedar cellar census chain chalk channel chapter charter cherry chess chest choir cider
circle circuit citrus clinic clock closet cloud clover coast cobalt coffee coin collar column
comet compass concert copper coral corner cottage cotton counter course court cradle crane crater
credit cricket crown crystal curtain cushion dairy dancer deck desert desk diamond dinner dock
dollar donkey dragon drawer drum eagle easel echo editor elbow ember engine envelope estate fabric
factory falcon farmer feather fence ferry fiddle field figure filter finger flame flask fleet
flower flute folder forest forge fossil fountain frame freight frost funnel galaxy gallery garden
garlic garnet gate gazette geyser giant ginger glacier glass globe glove goblet grain granite
grape gravel guitar gutter hammer hamper hangar harbor harvest hazel helmet hermit hinge hockey
honey horizon hotel hunter icon igloo index indigo insect invoice iris island ivory jacket jasmine
jersey jewel jigsaw journal jungle juniper kernel kettle kitchen kite ladder lagoon lamp lantern
laser laundry lawn leaf ledger lemon lens lever library lilac linen liquor lizard locker lodge
lotus lumber magnet mango manor mantle maple marble margin marina market marsh mask meadow medal
melody melon member menu mercury meter mill mineral mint mirror monitor monkey mosaic motor
mountain muffin museum napkin narrow nebula needle nickel notebook novel nugget nutmeg oasis oat
ocean office olive onion opal orange orbit orchard orchid organ otter oven oyster paddle palace
panel panther paper parade parcel parlor parrot pasta patrol pebble pelican pencil pepper petal
phone photo piano pigeon pillow pilot pine pirate piston planet plaster plaza pocket poem pond
poplar portal poster potato prairie prism puddle pulley pumpkin puppet pyramid quarry quartz quilt
rabbit radar radio rafter raisin ranch raven reactor recipe record reef ribbon rice ridge ring
river robin rocket roof rope rose ruby rudder saddle saffron sail salad salmon salon sample satin
saucer scarf school scooter season seed shadow sheep shelf shield shop shuttle silver siren sketch
slope snow sofa soup spark sphere spice spider spiral sponge spring squash stable stadium stamp
statue steam stencil storm stove straw stream studio sugar summit sunset surgeon swamp table
tablet tavern teacher temple tender tent theater thistle thread throne thunder ticket tiger timber
toast tomato tower tractor trail trophy trumpet tulip tunnel turbine umbrella unicorn urchin
valley vase vault velvet vendor vessel village vine violet violin volcano voyage wagon walnut
walrus warden water weasel wheat wheel whistle willow window winter wizard wolf wool yacht yarn
yogurt zebra zeppelin zinc zipper
""".split()

_VARIABLES = """
a b c d e f g h j k m n p q r s t u v w x y z alpha beta gamma second third left right top bottom
old base extra start end now then near far wide tall rich poor fast slow north south east west
inner outer prior later source goal mine yours front back seen due paid owed used
spare gross net heavy light warm cold young aged broad thin big long short deep flat dry wet
""".split()

_POOLS = {"word": _WORDS, "variable": _VARIABLES}
_KNOWN = frozenset(word for pool in _POOLS.values() for word in pool)
_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"


def split_of_word(word: str) -> Split:
    """Say which split owns a word; stable over versions of Python and of this file."""
    return "heldout" if hashlib.sha256(word.encode()).digest()[0] % 4 == 0 else "train"


@lru_cache(maxsize=8)
def words_of(pool: Literal["word", "variable"], split: Split) -> tuple[str, ...]:
    """List the words of a pool that a split owns, in a fixed order."""
    return tuple(word for word in dict.fromkeys(_POOLS[pool]) if split_of_word(word) == split)


def invent_word(rng: random.Random, split: Split) -> str:
    """Invent a pronounceable word that the given split owns and that no pool contains."""
    while True:
        syllables = rng.randint(2, 3)
        word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))
        word += rng.choice(["", "", "n", "r", "s", "l", "x", "t"])
        if split_of_word(word) == split and word not in _KNOWN:
            return word


def pick_words(
    rng: random.Random,
    pool: Literal["word", "variable"],
    split: Split,
    count: int,
    invented: float = 0.0,
) -> list[str]:
    """Draw distinct words of a split; each one is invented with the given probability."""
    known = words_of(pool, split)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        word = invent_word(rng, split) if rng.random() < invented else rng.choice(known)
        drawn[word] = None
    return list(drawn)
