"""Structured answers: what a text says of somebody, as JSON for a schema or as a tool's arguments.

Each function is given a `random.Random` and returns an example with one right answer.
It promises that every value stands in the text, and that a schema is shown as frameworks show it.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace

from headway.measure.skills import reading, words
from headway.measure.skills.dressing import Field, dress
from headway.measure.skills.example import Example, Turn
from headway.measure.skills.framing import compact, instructions, offered
from headway.measure.skills.toolbox import Tool, some_tool
from headway.measure.skills.values import VALUES, invented, person, topic
from headway.measure.skills.words import row

FACTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "age": (
        ("age", "age", "years", "age_in_years"),
        "age",
        ("{n} is {v} years old.", "{n} is {v}.", "The age of {n} is {v}.", "{n} turned {v} today."),
    ),
    "place": (
        row("city town home location place address"),
        "place",
        ("{n} lives in {v}.", "The home of {n} is {v}.", "{n} comes from {v}.", "{n} is in {v}."),
    ),
    "job": (
        row("job occupation profession role work"),
        "job",
        ("{n} is a {v}.", "{n} works as a {v}.", "The job of {n} is {v}."),
    ),
    "hue": (
        row("colour color favorite_color favourite"),
        "hue",
        ("{n} likes {v}.", "{n} likes the colour {v} best.", "The colour of {n} is {v}."),
    ),
    "pet": (row("pet animal"), "pet", ("{n} has a {v}.", "The pet of {n} is a {v}.")),
    "email": (
        row("email mail contact email_address"),
        "email",
        ("The email of {n} is {v}.", "Write to {n} at {v}.", "{n} can be reached at {v}."),
    ),
    "thing": (
        row("item product thing article"),
        "thing",
        ("{n} bought a {v}.", "{n} found a {v}.", "{n} ordered a {v}."),
    ),
    "count": (
        row("count books number quantity amount"),
        "number",
        ("{n} has {v} books.", "{n} owns {v} books.", "{n} counted {v}."),
    ),
    "day": (row("day date when"), "day", ("{n} comes on {v}.", "{n} was born on a {v}.")),
    "language": (row("language speaks"), "language", ("{n} speaks {v}.", "{n} learns {v}.")),
}


OF = ("The {k} of {n} is {v}.", "{n}'s {k} is {v}.")


def fact(rng: random.Random, name: str) -> tuple[str, Field, str]:
    """What a fact is about, its field, and the sentence that says it of somebody."""
    if rng.random() < 0.2:
        key = rng.choice((invented(rng), rng.choice(words.NOUNS)))
        kind, draw = VALUES[rng.choice(list(VALUES))]
        value = draw(rng)
        said = rng.choice(OF).format(k=key, n=name, v=value)
        return key, Field(name=key, value=value, kind=kind, told=f"The {key}"), said
    about = rng.choice(("age", "age", "place", *FACTS))
    keys, kind, phrases = FACTS[about]
    drawn: dict[str, Callable[[], tuple[str, object]]] = {
        "age": lambda: (rng.choice(("integer", "integer", "number")), rng.randint(1, 99)),
        "pet": lambda: ("string", rng.choice(words.CREATURES)),
    }
    json_type, value = drawn[kind]() if kind in drawn else (VALUES[kind][0], VALUES[kind][1](rng))
    said = rng.choice(phrases).format(n=name, v=value)
    field = Field(name=rng.choice(keys), value=value, kind=json_type, told=f"The {kind}")
    return about, field, said


def record(rng: random.Random) -> tuple[str, list[Field], str]:
    """The title of a schema, its fields with their values, and the text that says them."""
    dice, name = rng.random(), person(rng)
    if dice < 0.08:
        other, what, day = person(rng), topic(rng), rng.choice(words.DAYS)
        text = f"{name} and {other} are going to {rng.choice(('a', 'the'))} {what} on {day}."
        fields = [
            Field(name=rng.choice(("name", "event", "title")), value=what),
            Field(name=rng.choice(("date", "day")), value=day),
            Field(name=rng.choice(("participants", "people")), value=[name, other], kind="array"),
        ]
        return rng.choice(("CalendarEvent", "Event")), fields, text
    if dice < 0.16:
        example = reading.classify(rng, 1 if rng.random() < 0.5 else 3)
        labels = ("positive", "negative")
        key = rng.choice(("label", "sentiment", "answer", "category"))
        text = example.prompt.split("?", 1)[-1].split(":", 1)[-1].strip()
        return "Review", [Field(name=key, value=example.answer, choices=labels)], text
    known = (rng.choice(row("name name name person full_name first_name who user")), name)
    fields, said = [Field(name=known[0], value=name, told="The name of the person")], []
    taken: set[str] = set()
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        kind, field, sentence = fact(rng, name)
        if kind not in taken and field.name not in {field.name for field in fields}:
            taken.add(kind)
            fields.append(field)
            said.append(sentence)
    if rng.random() < 0.15 and len(fields) == 3:
        said = [f"{name}, {fields[1].value}, {fields[2].value}."]
    elif (
        len(said) == 2 and rng.random() < 0.4 and all(text.startswith(f"{name} ") for text in said)
    ):
        said = [f"{said[0][:-1]} and {said[1][len(name) + 1 :]}"]
    rng.shuffle(said)
    if rng.random() < 0.2:
        rng.shuffle(fields)
    title = rng.choice(("Person", "User", "UserInfo", "Customer", "Contact", invented(rng).title()))
    return title, fields, " ".join(said)


ASKED = ("{}", "{}", "{}", "Extract: {}", "Extract: {}", "Text: {}", "Extract the data: {}")
ABOUT = ("A person.", "What is known of a person", "", "", "A {}.", "Extracted information")


def values(fields: list[Field]) -> dict[str, object]:
    return {field.name: field.value for field in fields}


def unseen(rng: random.Random) -> Example:
    """JSON for a schema that the prompt does not show: a grammar keeps the answer to it."""
    _, fields, text = record(rng)
    return Example(
        system=instructions(rng),
        prompt=rng.choice(ASKED).format(text),
        answer=json.dumps(values(fields), ensure_ascii=False),
    )


GENIUS = (
    "\n            As a genius expert, your task is to understand the content and provide\n"
    "            the parsed objects in json that match the following json_schema:\n\n\n"
    "            {}\n\n            Make sure to return an instance of the JSON, not the schema"
    " itself\n"
)
ALWAYS = (
    "\nAlways respond with a JSON object that's compatible with this schema:\n\n{}\n\n"
    "Don't include any text or Markdown fencing before or after.\n"
)
GENERIC = (
    "JSON schema:\n{}\nYou MUST answer with a JSON object that matches the JSON schema above.",
    "Answer in JSON for this schema: {}",
    "Respond only with JSON that matches this schema:\n{}",
    "The output should be a JSON object of this schema.\n\n{}\n\nDo not return the schema itself.",
)
FENCED = "\n\nReturn the correct JSON response within a ```json codeblock. not the JSON_SCHEMA"


def shown(rng: random.Random) -> Example:
    """JSON for a schema that stands in the system message or before the text, long or in lines."""
    title, fields, text = record(rng)
    about = rng.choice(ABOUT).format(title)
    schema = json.dumps(dress(rng, title, about).schema(fields), indent=rng.choice((None, 2, 2)))
    answer = json.dumps(values(fields), ensure_ascii=False)
    ask = rng.choice(ASKED).format(text)
    dice = rng.random()
    if dice < 0.3:
        return Example(system=GENIUS.format(schema), prompt=ask, answer=answer)
    if dice < 0.4:
        fenced = f"```json\n{answer}\n```"
        return Example(system=GENIUS.format(schema), prompt=ask + FENCED, answer=fenced)
    if dice < 0.6:
        return Example(system=ALWAYS.format(schema), prompt=ask, answer=answer)
    said = rng.choice(GENERIC).format(schema)
    if dice < 0.8:
        return Example(system=said, prompt=ask, answer=answer)
    return Example(system=instructions(rng), prompt=f"{said}\n{ask}", answer=answer)


CORRECTLY = "Correctly extracted `{}` with all the required parameters with correct types"


def concluding(rng: random.Random, name: str, about: str, tool: Tool) -> tuple[Tool, str]:
    """The tool that takes what was asked for and what another tool has answered, and that answer.

    "How old is Anna?" found 30, so that the final result is {"name": "Anna", "age": 30}.
    """
    asked = replace(tool.fields[0], told="")
    key, kind = rng.choice((("age", "number"), ("result", "number"), ("answer", "topic")))
    json_type, draw = VALUES[kind]
    found = Field(name=rng.choice((key, invented(rng))), value=draw(rng), kind=json_type)
    closing = Tool(name=name, about=about, fields=[asked, found], question="")
    return closing, rng.choice((str(found.value), compact(rng, {found.name: found.value})))


def final(rng: random.Random) -> Example:
    """A structured answer as the call of a tool, alone or after another tool has answered."""
    title, fields, text = record(rng)
    name, about = rng.choice(
        (
            (title, CORRECTLY.format(title)),
            (title, rng.choice(ABOUT).format(title)),
            (title, "Model function."),
            ("final_result", "The final response which ends this conversation"),
            ("final_result", "The final response which ends this conversation"),
            (rng.choice(("extract", "answer", "respond", "submit")), "Give the answer."),
        )
    )
    closing = Tool(name=name, about=about, fields=fields, question=text)
    turns: list[Turn] = []
    prompt, tools = rng.choice(ASKED).format(text), [closing]
    tool = some_tool(rng)
    if rng.random() < 0.25 and tool.name != name:
        if rng.random() < 0.6:
            closing, text = concluding(rng, name, about, tool)
        prompt, tools = f"<tool_response>\n{text}\n</tool_response>", [tool, closing]
        turns = [(tool.question, tool.called())]
    system = offered(rng, tools)
    return Example(system=system, prompt=prompt, answer=closing.called(), before=tuple(turns))
