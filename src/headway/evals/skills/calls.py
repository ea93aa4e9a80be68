"""Chats with tools: one is called, none helps, or one has answered and its result is told.

Each function is given a `random.Random` and returns an example with one right answer.
It promises that an answer calls a tool exactly where the question asks for one of those offered.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from headway.evals.skills import reading, symbols, talk, words
from headway.evals.skills.example import Example, Turn
from headway.evals.skills.framing import SAID, compact, instructions, num_tools, offered
from headway.evals.skills.stories import tell
from headway.evals.skills.structured import call
from headway.evals.skills.toolbox import WRITTEN, Tool, both, some_tools
from headway.evals.skills.values import VALUES, invented, person, place, topic


def rounds(rng: random.Random) -> int:
    """How many questions are asked of the same tools or schema, one after the other."""
    return rng.choice((1, 1, 2, 3, 4, 6))


def one_call(rng: random.Random, tool: Tool) -> Turn:
    """A question with its call, now and then for two things at once."""
    if len(tool.fields) > 1 or rng.random() > 0.08 or tool.fields[0].kind != "string":
        return tool.question, tool.called()
    name, value = tool.fields[0].name, str(tool.fields[0].value)
    more = (place if tool.name in NEAR else person)(rng)
    if value not in tool.question or more == value:
        return tool.question, tool.called()
    question = tool.question.replace(value, f"{value} and {more}")
    return question, both(tool.called(), call(tool.name, {name: more}))


def called(rng: random.Random) -> Example:
    """Tools are called for one question after the other, mostly with their results between."""
    tools = some_tools(rng, num_tools(rng))
    turns: list[Turn] = []
    for _ in range(rounds(rng)):
        tool = rng.choice(tools).again(rng)
        turns.append(one_call(rng, tool))
        if rng.random() < 0.5:
            turns.append(told(rng, tool))
    while turns[-1][0].startswith("<tool_response>"):
        turns.pop()
    return chat(offered(rng, tools), turns)


def told(rng: random.Random, tool: Tool) -> Turn:
    """A tool's result, and the answer that tells it."""
    given, said = result(rng, tool)
    return f"<tool_response>\n{given}\n</tool_response>", said


def chat(system: str, turns: list[Turn]) -> Example:
    """The last turn as the question, those before it as the chat so far."""
    prompt, answer = turns[-1]
    return Example(system=system, prompt=prompt, answer=answer, before=tuple(turns[:-1]))


PLAIN: tuple[Callable[[random.Random], Example], ...] = (
    *(talk.identity, talk.greet, talk.colour, talk.animal, talk.opposite, talk.day, talk.greet),
    *(lambda rng: symbols.copy(rng, 1), lambda rng: symbols.reverse(rng, 1)),
    *(lambda rng: symbols.sort(rng, 1), lambda rng: reading.classify(rng, rng.randint(1, 3))),
    *(lambda rng: reading.lookup(rng, 1), lambda rng: reading.recall(rng, rng.randint(1, 2))),
    *(lambda rng: reading.refuse(rng, rng.randint(1, 2)), lambda rng: tell(rng, 1), talk.unknown),
)


NEAR = frozenset(name for names, *_ in (*WRITTEN[:2], WRITTEN[6]) for name in names)
"""Tools that may well know what the model does not: weather, time, search."""
UNKNOWN = "I am sorry, I do not know that."


def uncalled(rng: random.Random) -> Example:
    """Tools that do not help with what is asked: the answer is the one without them.

    Other questions before it may well have been for a tool.
    """
    example, tools = rng.choice(PLAIN)(rng), some_tools(rng, num_tools(rng))
    if example.answer == UNKNOWN and any(tool.name in NEAR for tool in tools):
        return uncalled(rng)
    turns: list[Turn] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        tool = rng.choice(tools).again(rng)
        turns += [(tool.question, tool.called()), told(rng, tool)]
    turns += [*example.before, (example.prompt, example.answer)]
    return replace(chat(offered(rng, tools), turns), pattern=example.pattern)


def sum_of_digits(rng: random.Random) -> Example:
    return symbols.arithmetic(rng, 1)


def instructed(rng: random.Random) -> Example:
    """A plain question after a system message."""
    example = rng.choice((*PLAIN, sum_of_digits))(rng)
    return Example(
        system=instructions(rng) or SAID[0],
        prompt=example.prompt,
        answer=example.answer,
        before=example.before,
    )


def result(rng: random.Random, tool: Tool) -> tuple[str, str]:
    """What a tool gave back, and the answer that says it: a sentence again, values by name."""
    dice, first = rng.random(), str(tool.fields[0].value)
    weather, degrees = rng.choice(talk.WEATHER), rng.randint(-20, 40)
    if dice < 0.35:
        said = rng.choice(
            (
                f"It is {weather} in {first}, {degrees} degrees.",
                f"It's always {weather} in {first}!",
                f"The weather in {first} is {weather}",
                f"{weather.capitalize()}, {degrees} degrees",
                f"The {rng.choice(words.NOUNS)} of {first} is {invented(rng)}.",
                f"{first}: {topic(rng)}",
                f"{topic(rng).capitalize()} {rng.choice(('is', 'was', 'has'))} {topic(rng)}.",
                f"Done, {rng.choice((first, topic(rng)))} was saved.",
            )
        )
        return said, said
    if dice < 0.5:
        value = rng.choice((rng.randint(0, 999), rng.randint(0, 9999) / 10, topic(rng), degrees))
        return (value if isinstance(value, str) else compact(rng, value)), f"The answer is {value}."
    if dice < 0.65:
        return compact(
            rng, {"weather": weather, "degrees": degrees}
        ), f"It is {weather}, {degrees} degrees."
    kinds = rng.sample(list(VALUES), rng.choice((1, 2, 2, 3)))
    values = {kind if rng.random() < 0.6 else invented(rng): VALUES[kind][1](rng) for kind in kinds}
    if rng.random() < 0.5:
        values = {tool.fields[0].name: tool.fields[0].value, **values}
    if rng.random() < 0.4:
        values |= {rng.choice(("temperature", "degrees", "price", "age", "total")): degrees}
    said = ", ".join(f"the {name.replace('_', ' ')} is {value}" for name, value in values.items())
    return compact(rng, values), f"{said[0].upper()}{said[1:]}."


def answered(rng: random.Random) -> Example:
    """A tool was called and has answered; what it said is told in words, call after call."""
    tools = some_tools(rng, num_tools(rng))
    turns: list[Turn] = []
    for _ in range(rounds(rng)):
        tool = rng.choice(tools).again(rng)
        arguments = {f.name: f.value for f in tool.fields if f.default is None}
        loose = f'{{"name": "{tool.name}", "arguments": {compact(rng, arguments)}}}'
        written = f"<tool_call>\n{loose}\n</tool_call>"
        turns += [(tool.question, tool.called()), told(rng, tool)]
        if rng.random() < 0.15 and len(turns) == 2:
            turns[0] = (tool.question, written)
    return chat(offered(rng, tools), turns)
