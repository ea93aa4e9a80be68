"""Chats with tools: a tool is called, no tool helps, or a tool's result is put into words.

Each function returns an example with one right answer. The answer calls a tool exactly if one of
the offered tools fits the question.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from headway.evals.skills import reading, symbols, talk, words
from headway.evals.skills.example import Example, Turn
from headway.evals.skills.framing import SYSTEM_SENTENCES, compact, instructions, num_tools, offered
from headway.evals.skills.stories import tell
from headway.evals.skills.structured import call
from headway.evals.skills.toolbox import TUTORIAL_TOOLS, Tool, both, some_tools
from headway.evals.skills.values import VALUES, invented, person, place, topic


def rounds(rng: random.Random) -> int:
    """Draw the number of questions for the same tools or schema."""
    return rng.choice((1, 1, 2, 3, 4, 6))


def one_call(rng: random.Random, tool: Tool) -> Turn:
    """Return a question with its call, sometimes with two calls at once."""
    if len(tool.fields) > 1 or rng.random() > 0.08 or tool.fields[0].kind != "string":
        return tool.question, tool.right_call()
    name, value = tool.fields[0].name, str(tool.fields[0].value)
    more = (place if tool.name in NEAR else person)(rng)
    if value not in tool.question or more == value:
        return tool.question, tool.right_call()
    question = tool.question.replace(value, f"{value} and {more}")
    return question, both(tool.right_call(), call(tool.name, {name: more}))


def called(rng: random.Random) -> Example:
    """Call tools for one question after the other, often with their results in between."""
    tools = some_tools(rng, num_tools(rng))
    turns: list[Turn] = []
    for _ in range(rounds(rng)):
        tool = rng.choice(tools).with_new_question(rng)
        turns.append(one_call(rng, tool))
        if rng.random() < 0.5:
            turns.append(result_turn(rng, tool))
    while turns[-1][0].startswith("<tool_response>"):
        turns.pop()
    return chat(offered(rng, tools), turns)


def result_turn(rng: random.Random, tool: Tool) -> Turn:
    """Return a tool's result as a turn, with the sentence that states it as the answer."""
    given, sentence = result(rng, tool)
    return f"<tool_response>\n{given}\n</tool_response>", sentence


def chat(system: str, turns: list[Turn]) -> Example:
    """Make an example of the turns: the last one is the question, the others come before it."""
    prompt, answer = turns[-1]
    return Example(system=system, prompt=prompt, answer=answer, before=tuple(turns[:-1]))


PLAIN: tuple[Callable[[random.Random], Example], ...] = (
    *(talk.identity, talk.greet, talk.colour, talk.animal, talk.opposite, talk.day, talk.greet),
    *(lambda rng: symbols.copy(rng, 1), lambda rng: symbols.reverse(rng, 1)),
    *(lambda rng: symbols.sort(rng, 1), lambda rng: reading.classify(rng, rng.randint(1, 3))),
    *(lambda rng: reading.lookup(rng, 1), lambda rng: reading.recall(rng, rng.randint(1, 2))),
    *(lambda rng: reading.refuse(rng, rng.randint(1, 2)), lambda rng: tell(rng, 1), talk.unknown),
)


NEAR = frozenset(name for names, *_ in (*TUTORIAL_TOOLS[:2], TUTORIAL_TOOLS[6]) for name in names)
"""Tools that may know what the model does not: weather, time, search."""
UNKNOWN = "I am sorry, I do not know that."


def uncalled(rng: random.Random) -> Example:
    """Offer tools that do not help with the question: the answer is the same as without tools.

    Earlier questions of the chat may call a tool.
    """
    example, tools = rng.choice(PLAIN)(rng), some_tools(rng, num_tools(rng))
    if example.answer == UNKNOWN and any(tool.name in NEAR for tool in tools):
        return uncalled(rng)
    turns: list[Turn] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        tool = rng.choice(tools).with_new_question(rng)
        turns += [(tool.question, tool.right_call()), result_turn(rng, tool)]
    turns += [*example.before, (example.prompt, example.answer)]
    return replace(chat(offered(rng, tools), turns), pattern=example.pattern)


def sum_of_digits(rng: random.Random) -> Example:
    return symbols.arithmetic(rng, 1)


def instructed(rng: random.Random) -> Example:
    """Ask a plain question after a system message."""
    example = rng.choice((*PLAIN, sum_of_digits))(rng)
    return Example(
        system=instructions(rng) or SYSTEM_SENTENCES[0],
        prompt=example.prompt,
        answer=example.answer,
        before=example.before,
    )


def result(rng: random.Random, tool: Tool) -> tuple[str, str]:
    """Return a tool's result and the answer that states it: a sentence, a value, or values by
    name."""
    dice, first = rng.random(), str(tool.fields[0].value)
    weather, degrees = rng.choice(talk.WEATHER), rng.randint(-20, 40)
    if dice < 0.35:
        sentence = rng.choice(
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
        return sentence, sentence
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
    sentence = ", ".join(
        f"the {name.replace('_', ' ')} is {value}" for name, value in values.items()
    )
    return compact(rng, values), f"{sentence[0].upper()}{sentence[1:]}."


def answered(rng: random.Random) -> Example:
    """Put a tool's result into words, call after call."""
    tools = some_tools(rng, num_tools(rng))
    turns: list[Turn] = []
    for _ in range(rounds(rng)):
        tool = rng.choice(tools).with_new_question(rng)
        arguments = {f.name: f.value for f in tool.fields if f.default is None}
        loose = f'{{"name": "{tool.name}", "arguments": {compact(rng, arguments)}}}'
        written = f"<tool_call>\n{loose}\n</tool_call>"
        turns += [(tool.question, tool.right_call()), result_turn(rng, tool)]
        if rng.random() < 0.15 and len(turns) == 2:
            turns[0] = (tool.question, written)
    return chat(offered(rng, tools), turns)
