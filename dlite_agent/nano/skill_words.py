"""Words of the short conversations: greetings, places, jokes and alphabets."""

from __future__ import annotations

import random

__all__ = ["CHAT", "CITIES", "JOKES", "SCRIPTS", "WEATHER", "foreign_word"]

CHAT: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello! How can I help you?"),
    ("hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("hi", "Hi! How can I help you?"),
    ("Hi", "Hi! How can I help you?"),
    ("Hi there", "Hi! How can I help you?"),
    ("Hey", "Hi! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("how are you", "I am well, thank you. What can I do for you?"),
    ("How are you?", "I am well, thank you. What can I do for you?"),
    ("Well, thanks.", "Good to hear. What can I do for you?"),
    ("Who are you?", "I am nano, a very small model. I fix bugs in small Python repositories."),
    (
        "What can you do?",
        "I can list files, run tests, read files and fix small bugs in Python code.",
    ),
    ("What is your name?", "I am nano."),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
    ("ok", "Good. What is next?"),
    ("Count to five.", "1, 2, 3, 4, 5"),
    ("Write a haiku.", "Small model at work, reading lines until the tests all turn green again."),
    ("Tell me something.", "A test that fails names the function to look at."),
    ("What is the capital of France?", "I am a very small model and know little about that."),
    ("Tell me about the history of Rome.", "I am a very small model and know little about that."),
    ("Can you help me?", "Yes. Tell me which repository has a failing test."),
)

CITIES: tuple[str, ...] = (
    "San Francisco, CA",
    "San Francisco",
    "Paris",
    "London",
    "Berlin",
    "Tokyo",
    "New York",
    "New York, NY",
    "Boston, MA",
    "Rome",
    "Madrid",
    "Oslo",
    "Cairo",
    "Lima",
    "Seoul",
    "Sydney",
    "Zürich",
    "München",
    "São Paulo",
    "東京",
    "北京",
)

WEATHER: tuple[str, ...] = (
    "It's sunny.",
    "It's raining.",
    "Cloudy, 14 degrees.",
    "Snow and wind.",
    "Sunny, 25 degrees.",
    "It is foggy.",
    "Light rain.",
)

JOKES: tuple[tuple[str, str, str], ...] = (
    ("cats", "Why did the cat sit on the computer?", "To keep an eye on the mouse."),
    ("dogs", "Why did the dog sit in the shade?", "It did not want to be a hot dog."),
    ("birds", "Why do birds fly south?", "It is too far to walk."),
    ("bears", "What do you call a bear with no teeth?", "A gummy bear."),
    ("cows", "Where do cows go on Friday?", "To the moo-vies."),
    ("fish", "Why are fish so clever?", "They live in schools."),
    ("tests", "Why did the test cross the road?", "To get to the other assert."),
)

SCRIPTS: tuple[str, ...] = (
    "你好啊集团公司中国科技有限北京上海大学银行东方文化国际新华天地人和平安海山水火木金土日月星云风",
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをん",
    "こんにちは株式会社日本東京大阪電気工業商店",
    "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワン",
    "가나다라마바사아자차카타파하한국서울회사은행학교",
    "абвгдежзиклмнопрстуфхцчшщэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "äöüßéèêëçñåøæœ",
)

_CHINESE = range(0x4E00, 0x9FA6)
_BLOCKS = (_CHINESE, _CHINESE, range(0xAC00, 0xD7A4), range(0x3041, 0x3097), range(0x30A1, 0x30FB))
"""Chinese, twice as often; Korean; Hiragana; Katakana."""


def foreign_word(rng: random.Random) -> str:
    """Draw 2 to 9 characters of one script, some of them again and again.

    A character that the tokenizer has no token for is two or three bytes, and many characters share
    bytes: who copies them must look further back than one byte, which characters of a short list
    don't teach.
    """
    if rng.random() < 0.5:
        letters = rng.choice(SCRIPTS)
    else:
        block = rng.choice(_BLOCKS)
        letters = "".join(chr(rng.choice(block)) for _ in range(9))
    if rng.random() < 0.25:
        letters = "".join(rng.choice(letters) for _ in range(2))
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, 9)))
