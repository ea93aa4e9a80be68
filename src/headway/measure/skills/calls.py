"""Chats with tools: one is called, none helps, or one has answered and its result is told.

Each function is given a `random.Random` and returns an example with one right answer.
It promises that an answer calls a tool exactly where the question asks for one of those offered.
"""

import random
from collections.abc import Callable

from headway.measure.skills import reading, symbols, talk, words
from headway.measure.skills.example import Example, Turn
from headway.measure.skills.framing import SAID, compact, instructions, num_tools, offered
from headway.measure.skills.stories import tell
from headway.measure.skills.structured import call
from headway.measure.skills.toolbox import WRITTEN, Tool, both, some_tools
from headway.measure.skills.values import VALUES, invented, person, place, topic


def called(rng: random.Random) -> Example:
    """One of some tools is called, now and then for two things at once."""
    tools = some_tools(rng, num_tools(rng))
    wanted, system = tools[0], offered(rng, tools)
    if len(wanted.fields) > 1 or rng.random() > 0.1 or wanted.fields[0].kind != "string":
        return Example(system=system, prompt=wanted.question, answer=wanted.called())
    name, value = wanted.fields[0].name, str(wanted.fields[0].value)
    more = (place if wanted.name in NEAR else person)(rng)
    if value not in wanted.question or more == value:
        return Example(system=system, prompt=wanted.question, answer=wanted.called())
    question = wanted.question.replace(value, f"{value} and {more}")
    answer = both(wanted.called(), call(wanted.name, {name: more}))
    return Example(system=system, prompt=question, answer=answer)


PLAIN: tuple[Callable[[random.Random], Example], ...] = (
    *(talk.identity, talk.greet, talk.colour, talk.animal, talk.opposite, talk.day, talk.greet),
    *(lambda rng: symbols.copy(rng, 1), lambda rng: symbols.reverse(rng, 1)),
    *(lambda rng: symbols.sort(rng, 1), lambda rng: reading.classify(rng, rng.randint(1, 3))),
    *(lambda rng: reading.lookup(rng, 1), lambda rng: reading.recall(rng, rng.randint(1, 2))),
    *(lambda rng: reading.refuse(rng, rng.randint(1, 2)), lambda rng: tell(rng, 1), talk.unknown),
)


NEAR = frozenset(name for names, *_ in (*WRITTEN[:2], WRITTEN[6]) for name in names)
"""Tools that may well know what the model does not: weather, time, search."""


def uncalled(rng: random.Random) -> Example:
    """Tools that do not help with what is asked: the answer is the one without them."""
    example = rng.choice(PLAIN)(rng)
    tools = some_tools(rng, num_tools(rng))
    if (
        any(tool.name in NEAR for tool in tools)
        and example.answer == "I am sorry, I do not know that."
    ):
        return uncalled(rng)
    return Example(
        system=offered(rng, tools),
        prompt=example.prompt,
        answer=example.answer,
        before=example.before,
        pattern=example.pattern,
    )


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
    """A tool was called and has answered; what it said is told in words."""
    tools = some_tools(rng, num_tools(rng))
    tool = tools[0]
    given, said = result(rng, tool)
    turns: list[Turn] = [(tool.question, tool.called())]
    if rng.random() < 0.25:
        arguments = {f.name: f.value for f in tool.fields if f.default is None}
        loose = f'{{"name": "{tool.name}", "arguments": {compact(rng, arguments)}}}'
        turns = [(tool.question, f"<tool_call>\n{loose}\n</tool_call>")]
    prompt = f"<tool_response>\n{given}\n</tool_response>"
    system = offered(rng, tools)
    if rng.random() < 0.3:
        other = some_tools(rng, 1)[0]
        if other.name not in {tool.name for tool in tools}:
            system = offered(rng, [*tools, other])
            turns = [*turns, (prompt, said)]
            return Example(
                system=system, prompt=other.question, answer=other.called(), before=tuple(turns)
            )
    return Example(system=system, prompt=prompt, answer=said, before=tuple(turns))
