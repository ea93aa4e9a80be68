"""Structured answers: facts of a text as JSON for a schema, or as arguments of a tool.

Each function returns an example with one right answer. All values are in the text, and a schema is
written as frameworks write it.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.evals.skills import reading, words
from headway.evals.skills.dressing import Field, draw_style
from headway.evals.skills.example import Example, Turn
from headway.evals.skills.framing import compact, instructions, offered
from headway.evals.skills.toolbox import Tool, some_tool
from headway.evals.skills.values import VALUES, invented, person, topic
from headway.evals.skills.words import row

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
DRAW_VALUE: dict[str, Callable[[random.Random], object]] = {
    "age": lambda rng: rng.randint(1, 99),
    "pet": lambda rng: rng.choice(words.CREATURES),
    **{kind: draw for kind, (_, draw) in VALUES.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A kind of fact about a person: its field without a value, the kind of value, and
    sentences."""

    field: Field
    kind: str
    phrases: tuple[str, ...]

    def state(self, rng: random.Random, name: str) -> tuple[Field, str]:
        """Return the field with a random value, and a sentence that states it about `name`."""
        value = DRAW_VALUE[self.kind](rng)
        sentence = rng.choice(self.phrases).format(k=self.field.name, n=name, v=value)
        return replace(self.field, value=value), sentence


def fact(rng: random.Random) -> Fact:
    """Draw a kind of fact from the table, or an invented one."""
    if rng.random() < 0.2:
        key, kind = rng.choice((invented(rng), rng.choice(words.NOUNS))), rng.choice(list(VALUES))
        field = Field(name=key, value=None, kind=VALUES[kind][0], description=f"The {key}")
        return Fact(field=field, kind=kind, phrases=OF)
    keys, kind, phrases = FACTS[rng.choice(("age", "age", "place", *FACTS))]
    json_type = VALUES[kind][0] if kind in VALUES else "string"
    if kind == "age":
        json_type = rng.choice(("integer", "integer", "number"))
    field = Field(name=rng.choice(keys), value=None, kind=json_type, description=f"The {kind}")
    return Fact(field=field, kind=kind, phrases=phrases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A schema's title, and `fill`, which draws fields with values and a text that contains
    them."""

    title: str
    fill: Callable[[random.Random], tuple[list[Field], str]]


def event(rng: random.Random) -> Form:
    """Return a form for an event: title, day and participants."""
    names = (
        rng.choice(("name", "event", "title")),
        rng.choice(("date", "day")),
        rng.choice(("participants", "people")),
    )

    def fill(rng: random.Random) -> tuple[list[Field], str]:
        one, other, what, day = person(rng), person(rng), topic(rng), rng.choice(words.DAYS)
        fields = [
            Field(name=names[0], value=what),
            Field(name=names[1], value=day),
            Field(name=names[2], value=[one, other], kind="array"),
        ]
        return fields, f"{one} and {other} are going to {rng.choice(('a', 'the'))} {what} on {day}."

    return Form(title=rng.choice(("CalendarEvent", "Event")), fill=fill)


def review(rng: random.Random) -> Form:
    """Return a form for a review with one of two labels."""
    key = rng.choice(("label", "sentiment", "answer", "category"))

    def fill(rng: random.Random) -> tuple[list[Field], str]:
        example = reading.classify(rng, rng.choice((1, 3)))
        text = example.prompt.split("?", 1)[-1].split(":", 1)[-1].strip()
        return [Field(name=key, value=example.answer, choices=("positive", "negative"))], text

    return Form(title="Review", fill=fill)


def person_form(rng: random.Random) -> Form:
    """Return a form for a person with one to four facts; the name is mostly first."""
    key = rng.choice(row("name name name name person full_name first_name who user"))
    facts: list[Fact] = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4))):
        one = fact(rng)
        used_names = {key} | {other.field.name for other in facts}
        used_phrases = {other.phrases for other in facts} - {OF}
        if one.field.name not in used_names and one.phrases not in used_phrases:
            facts.append(one)
    place_of_name = 0 if rng.random() < 0.8 else rng.randint(0, len(facts))

    def fill(rng: random.Random) -> tuple[list[Field], str]:
        name = person(rng)
        statements = [fact.state(rng, name) for fact in facts]
        fields, sentences = [field for field, _ in statements], [text for _, text in statements]
        fields.insert(
            place_of_name, Field(name=key, value=name, description="The name of the person")
        )
        if (
            len(sentences) == 2
            and rng.random() < 0.4
            and all(s.startswith(f"{name} ") for s in sentences)
        ):
            sentences = [f"{sentences[0][:-1]} and {sentences[1][len(name) + 1 :]}"]
        rng.shuffle(sentences)
        return fields, " ".join(sentences)

    titles = ("Person", "Person", "User", "UserInfo", "Customer", "Contact")
    title = rng.choice(titles) if rng.random() < 0.8 else invented(rng).title()
    return Form(title=title, fill=fill)


def form(rng: random.Random) -> Form:
    """Draw a form, mostly of a person."""
    return rng.choice((event, review, *[person_form] * 10))(rng)


REQUESTS = ("{}", "{}", "{}", "Extract: {}", "Extract: {}", "Text: {}", "Extract the data: {}")
ABOUT = ("A person.", "What is known of a person", "", "", "A {}.", "Extracted information")


def values(fields: list[Field]) -> dict[str, object]:
    return {field.name: field.value for field in fields}


def texts(rng: random.Random) -> int:
    """Draw the number of texts for the same schema."""
    return rng.choice((1, 1, 1, 2, 3, 4))


def read(
    rng: random.Random, system: str, form: Form, *, first: str = "", suffix: str = ""
) -> Example:
    """Return texts with their JSON; `first` precedes the first text, `suffix` follows each."""
    turns: list[Turn] = []
    for _ in range(texts(rng)):
        fields, text = form.fill(rng)
        answer = json.dumps(values(fields), ensure_ascii=False)
        if suffix:
            answer = f"```json\n{answer}\n```"
        turns.append((first * (not turns) + rng.choice(REQUESTS).format(text) + suffix, answer))
    prompt, answer = turns[-1]
    return Example(system=system, prompt=prompt, answer=answer, before=tuple(turns[:-1]))


def unseen(rng: random.Random) -> Example:
    """Ask for JSON without the schema in the prompt: the server's grammar enforces it."""
    return read(rng, instructions(rng), form(rng))


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
    """Ask for JSON with the schema in the system message or before the text."""
    target = form(rng)
    fields, _ = target.fill(rng)
    about = rng.choice(ABOUT).format(target.title)
    schema = json.dumps(
        draw_style(rng, target.title, about).schema(fields), indent=rng.choice((None, 2, 2))
    )
    dice = rng.random()
    if dice < 0.4:
        return read(rng, GENIUS.format(schema), target, suffix=FENCED * (dice < 0.12))
    if dice < 0.6:
        return read(rng, ALWAYS.format(schema), target)
    instruction = rng.choice(GENERIC).format(schema)
    if dice < 0.8:
        return read(rng, instruction, target)
    return read(rng, instructions(rng), target, first=f"{instruction}\n")


CORRECTLY = "Correctly extracted `{}` with all the required parameters with correct types"


def concluding(rng: random.Random, name: str, about: str, tool: Tool) -> tuple[Tool, str]:
    """Return a final tool for a question and another tool's result, and that result.

    If the answer to "How old is Anna?" is 30, the final call is {"name": "Anna", "age": 30}.
    """
    question_field = replace(tool.fields[0], description="")
    key, kind = rng.choice((("age", "number"), ("result", "number"), ("answer", "topic")))
    json_type, draw = VALUES[kind]
    result_field = Field(name=rng.choice((key, invented(rng))), value=draw(rng), kind=json_type)
    closing = Tool(name=name, about=about, fields=[question_field, result_field], question="")
    return closing, rng.choice(
        (str(result_field.value), compact(rng, {result_field.name: result_field.value}))
    )


def final(rng: random.Random) -> Example:
    """Return structured answers as tool calls, or one after the result of another tool."""
    target = form(rng)
    name, about = rng.choice(
        (
            (target.title, CORRECTLY.format(target.title)),
            (target.title, rng.choice(ABOUT).format(target.title)),
            (target.title, "Model function."),
            ("final_result", "The final response which ends this conversation"),
            ("final_result", "The final response which ends this conversation"),
            (rng.choice(("extract", "answer", "respond", "submit")), "Give the answer."),
        )
    )
    tool = some_tool(rng)
    if rng.random() < 0.25 and tool.name != name:
        closing, result = concluding(rng, name, about, tool)
        prompt, turns = (
            f"<tool_response>\n{result}\n</tool_response>",
            [(tool.question, tool.right_call())],
        )
        system = offered(rng, [tool, closing])
        return Example(
            system=system, prompt=prompt, answer=closing.right_call(), before=tuple(turns)
        )
    turns = []
    for _ in range(texts(rng)):
        fields, text = target.fill(rng)
        closing = Tool(name=name, about=about, fields=fields, question="")
        turns.append((rng.choice(REQUESTS).format(text), closing.right_call()))
    prompt, answer = turns[-1]
    system = offered(rng, [closing])
    return Example(system=system, prompt=prompt, answer=answer, before=tuple(turns[:-1]))
