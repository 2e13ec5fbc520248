"""Short conversations that teach what a chat model's standard tests ask for.

Copying an argument into a call, deciding whether to call, choosing among tools, tools without
arguments, arguments in any script, plain answers, histories with tools, and odd sequences of
roles.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping

from dlite_agent.nano.chatml import Conversation
from dlite_agent.nano.names import Split, invent_word, pick_words
from dlite_agent.nano.oracle import Transcript
from dlite_agent.nano.skill_words import CHAT, CITIES, JOKES, WEATHER, foreign_word

__all__ = ["skill_conversation"]

Tool = dict[str, object]

_ASK_NUMBER = (
    "What is the value of {f}({x})? Use the tool.",
    "Call {f} with {x}.",
    "What is {f}({x})?",
    "Use {f} on {x}.",
    "Please compute {f}({x}).",
    "Apply {f} to {x} and tell me the result.",
)
_ASK_NOTHING = (
    "What is the value of {f}()? Use the tool.",
    "Call {f}.",
    "What is {f}()?",
    "Use {f} please.",
    "Run {f}().",
)
_ASK_WEATHER = (
    "What is the weather in {x}?",
    "How is the weather in {x}?",
    "Weather in {x}, please.",
    "Tell me the weather in {x}.",
    "What's the weather like in {x}?",
)
_ASK_PERSON = (
    "Create a {n} named '{x}' ({w}) - a {d}",
    "Create a {n} named '{x}' - a {d}",
    "Add the {n} '{x}', a {d}",
    "Please create the {n} '{x}' - a {d}",
)
_ARGUMENT_LINES = """

    Args:
        {a}: The {n}'s name in their native language.
        {b}: Description of the {n}.

    Returns:
        A confirmation message about the {n} creation."""
_ASK_STYLE = (
    "Using the tool, generate a {x} greeting.",
    "Generate a {x} greeting with the tool.",
    "Use the tool for a {x} greeting.",
)


def _tool(rng: random.Random, name: str, description: str, /, **types: str) -> Tool:
    """Write a schema as one of several clients would."""
    properties: dict[str, object] = {}
    style = rng.choice(["plain", "title", "described"])
    for argument, kind in types.items():
        schema: dict[str, object] = {"type": kind}
        if style == "title":
            schema["title"] = argument.replace("_", " ").title()
        if style == "described":
            schema = {"description": f"The {argument.replace('_', ' ')}.", "type": kind}
        if kind == "integer" and rng.random() < 0.3:
            schema |= {"exclusiveMaximum": 1000, "exclusiveMinimum": -1000}
        properties[argument] = schema
    parameters: dict[str, object] = {"properties": properties, "type": "object"}
    if types:
        parameters["required"] = list(types)
    if rng.random() < 0.3:
        parameters = dict(sorted(parameters.items(), reverse=True))
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _name(rng: random.Random, split: Split) -> str:
    word = pick_words(rng, "word", split, 1, 0.3)[0]
    return rng.choice(
        [
            f"{word}_function",
            f"get_{word}",
            f"{word}_tool",
            f"magic_{word}",
            f"my_{word}",
            f"{word}",
        ]
    )


def _number(rng: random.Random) -> int:
    return rng.choice([rng.randint(0, 9), rng.randint(10, 99), rng.randint(-999, 999)])


def _other_tools(rng: random.Random, split: Split) -> list[Tool]:
    others = []
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        description = rng.choice(["Do something.", "Look something up.", "Compute a value."])
        kind = rng.choice(["integer", "string"])
        others.append(_tool(rng, _name(rng, split), description, **{rng.choice("xyn"): kind}))
    return others


def _finish(
    rng: random.Random,
    transcript: Transcript,
    tools: list[Tool],
    call: tuple[str, Mapping[str, object]],
    result: str,
    text: str,
) -> list[Tool]:
    """Add the call, and mostly its result and the answer to it."""
    name, arguments = call
    transcript.call(f"I call {name}.", name, arguments)
    if rng.random() < 0.6:
        transcript.say("tool", result)
        transcript.answer(text, "I have the result.")
    rng.shuffle(tools)
    return tools


def _number_skill(rng: random.Random, split: Split, transcript: Transcript) -> list[Tool]:
    name, argument = _name(rng, split), rng.choice(["input", "x", "n", "value", "number", "_input"])
    if rng.random() < 0.25:
        name = "magic_function"
        argument = "input"
    x, result = _number(rng), _number(rng)
    transcript.say("user", rng.choice(_ASK_NUMBER).format(f=name, x=x))
    tool = _tool(
        rng,
        name,
        rng.choice(["Apply a magic function to an input.", f"Apply {name}."]),
        **{argument: "integer"},
    )
    tools = [tool, *_other_tools(rng, split)]
    return _finish(
        rng, transcript, tools, (name, {argument: x}), str(result), f"The result is {result}."
    )


def _nothing_skill(rng: random.Random, split: Split, transcript: Transcript) -> list[Tool]:
    name = "magic_function_no_args" if rng.random() < 0.25 else f"{_name(rng, split)}_no_args"
    if rng.random() < 0.5:
        name = name.removesuffix("_no_args")
    result = _number(rng)
    transcript.say("user", rng.choice(_ASK_NOTHING).format(f=name))
    tools = [
        _tool(rng, name, rng.choice(["Calculate a magic function.", f"Run {name}."])),
        *_other_tools(rng, split),
    ]
    return _finish(rng, transcript, tools, (name, {}), str(result), f"The result is {result}.")


def _weather_skill(rng: random.Random, split: Split, transcript: Transcript) -> list[Tool]:
    place = rng.choice(CITIES)
    if rng.random() < 0.5:
        place = pick_words(rng, "word", split, 1, 0.8)[0].title() + rng.choice(
            ["", " City", ", CA", ", UK"]
        )
    argument = rng.choice(["location", "location", "city", "place"])
    name = rng.choice(["get_weather", "get_weather", "weather", "weather_in"])
    weather = rng.choice(WEATHER)
    transcript.say("user", rng.choice(_ASK_WEATHER).format(x=place))
    tools = [
        _tool(rng, name, "Get the weather at a location.", **{argument: "string"}),
        *_other_tools(rng, split),
    ]
    return _finish(
        rng,
        transcript,
        tools,
        (name, {argument: place}),
        weather,
        f"The weather in {place}: {weather}",
    )


def _person_skill(rng: random.Random, split: Split, transcript: Transcript) -> list[Tool]:
    x = foreign_word(rng)
    noun = rng.choice(["customer", "customer", "person", "company", "client"])
    kind = rng.choice(
        ["Chinese", "Japanese", "Korean", "Russian", "Greek", "small", "large", "French"]
    )
    kind += rng.choice([" technology company", " company", " bank", " school", " shop"])
    words = (
        f"{invent_word(rng, split).title()} {rng.choice(['Group', 'Corporation', 'Ltd', 'House'])}"
    )
    name = rng.choice(["unicode_customer", f"create_{noun}", f"add_{noun}"])
    transcript.say("user", rng.choice(_ASK_PERSON).format(n=noun, x=x, w=words, d=kind))
    first, second = rng.choice(
        [("customer_name", "description"), ("name", "description"), ("name", "about")]
    )
    about = f"Tool for creating a {noun} with Unicode name."
    if rng.random() < 0.4:
        about += _ARGUMENT_LINES.format(a=first, b=second, n=noun)
    tools = [_tool(rng, name, about, **{first: "string", second: "string"})]
    call = name, {first: x, second: kind}
    return _finish(
        rng,
        transcript,
        tools,
        call,
        f"Created {noun}: {x} - {kind}",
        f"Created {noun}: {x} - {kind}",
    )


def _sum_skill(rng: random.Random, split: Split, transcript: Transcript) -> list[Tool]:
    name = rng.choice(["my_adder_tool", "add", "adder", f"{_name(rng, split)}"])
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    result = json.dumps({"result": a + b})
    tools = [_tool(rng, name, "Tool to add two integers.", a="integer", b="integer")]
    transcript.say(
        "user", rng.choice([f"What is {a} + {b}", f"What is {a} + {b}?", f"Add {a} and {b}."])
    )
    call: tuple[str, Mapping[str, object]] = name, {"a": a, "b": b}
    if rng.random() < 0.25:
        transcript.unlearned.add(len(transcript.messages))
        transcript.call(f"I call {name}.", name, {"a": a})
        transcript.say("tool", "Error: Missing required argument 'b'.")
    if rng.random() < 0.2:
        transcript.call(f"I call {name}.", *call)
        transcript.say("tool", result)
        transcript.answer(rng.choice([f"The result is {a + b}.", result]), "I have the result.")
        transcript.unlearned.add(len(transcript.messages) - 1)
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        transcript.say("user", f"What is {a} + {b}")
        call, result = (name, {"a": a, "b": b}), json.dumps({"result": a + b})
    return _finish(rng, transcript, tools, call, result, f"The result is {a + b}.")


def _style_skill(rng: random.Random, split: Split, transcript: Transcript) -> list[Tool]:
    style = rng.choice(
        ["Pirate", "Viking", "Robot", "Royal", "Cowboy", invent_word(rng, split).title()]
    )
    name = rng.choice(["greeting_generator", "greeter", "make_greeting"])
    argument = rng.choice(["answer_style", "style"])
    transcript.say("user", rng.choice(_ASK_STYLE).format(x=style))
    tools = [
        _tool(
            rng,
            name,
            "Generate a greeting in a particular style of speaking.",
            **{argument: "string"},
        )
    ]
    return _finish(rng, transcript, tools, (name, {argument: style}), "hello matey", "hello matey")


def _joke_skill(rng: random.Random, _split: Split, transcript: Transcript) -> list[Tool]:
    topic, setup, punchline = rng.choice(JOKES)
    transcript.say(
        "user",
        rng.choice(["Tell me a joke about {t}.", "A joke about {t}, please."]).format(t=topic),
    )
    if rng.random() < 0.3:
        transcript.answer(f"{setup} {punchline}", "I tell a joke.")
        return []
    tools = [_tool(rng, "Joke", "Joke to tell user.", setup="string", punchline="string")]
    transcript.call("I call Joke.", "Joke", {"setup": setup, "punchline": punchline})
    return tools


def _chat_skill(rng: random.Random, split: Split, transcript: Transcript) -> list[Tool]:
    for _ in range(rng.choice([1, 1, 2])):
        question, answer = rng.choice(CHAT)
        if rng.random() < 0.2:
            transcript.say("user", question)
        transcript.say("user", question)
        transcript.answer(answer, "I answer.")
    return _other_tools(rng, split) if rng.random() < 0.7 else []


_SKILLS: tuple[tuple[Callable[[random.Random, Split, Transcript], list[Tool]], float], ...] = (
    (_number_skill, 3.0),
    (_nothing_skill, 2.0),
    (_weather_skill, 2.0),
    (_person_skill, 5.0),
    (_sum_skill, 2.0),
    (_style_skill, 0.5),
    (_joke_skill, 0.5),
    (_chat_skill, 3.0),
)


def skill_conversation(rng: random.Random, *, split: Split, thinking: bool) -> Conversation:
    """Write one short conversation.

    Args:
        rng: Source of every choice.
        split: Whose names to use.
        thinking: Whether thoughts are written.
    """
    transcript = Transcript(thinking)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        transcript.say(
            "system",
            rng.choice(
                ["You are a helpful assistant.", "hello", "You're a good assistant", "Be brief."]
            ),
        )
    write = rng.choices([skill for skill, _ in _SKILLS], [weight for _, weight in _SKILLS])[0]
    tools = write(rng, split, transcript)
    return Conversation(transcript.messages, tools, thinking, frozenset(transcript.unlearned))
