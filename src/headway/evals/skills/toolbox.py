"""Tools as users write them: those of common tutorials, and invented ones.

A tool comes with a question that needs one call of it; the arguments of the right call are in the
question, or are defaults.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.evals.skills import words
from headway.evals.skills.dressing import Field, function
from headway.evals.skills.example import TOOL_CLOSE, TOOL_OPEN, typed
from headway.evals.skills.structured import call
from headway.evals.skills.values import JOBS, TOPICS, VALUES, invented
from headway.evals.skills.words import row

Slots = tuple[tuple[tuple[str, ...], str], ...]
"""For each argument its possible names, and the kind of its value."""

PLACE = (row("city location place town city_name destination"), "place")
PERSON = (row("name person who user person_name customer"), "person")
TERMS: Slots = (
    (("a", "x", "first", "left"), "fraction"),
    (("b", "y", "second", "right"), "fraction"),
)
TUTORIAL_TOOLS: tuple[tuple[tuple[str, ...], tuple[str, ...], Slots, tuple[str, ...]], ...] = (
    (
        row("get_weather weather getWeather get_current_weather weather_forecast fetch_weather"),
        (
            *("Get the weather in a city.", "Get weather for a given city.", "Weather lookup"),
            *("Get the weather in a location", "Get the current weather in a given location."),
            *("Returns the weather report", "Fetch the weather for a given location."),
        ),
        (PLACE,),
        (
            *("What is the weather in {0}?", "What's the weather in {0}?", "Weather in {0}?"),
            *("How is the weather in {0}?", "What is the weather like in {0} today?"),
            *("Tell me the weather in {0}.", "Is it sunny in {0}?", "Will it rain in {0}?"),
            *("What's the weather like in {0}?", "How warm is it in {0}?"),
        ),
    ),
    (
        row("get_time getTime current_time time_in get_current_time"),
        ("Get the current time in a city.", "Tell the time in a place", "Returns the local time"),
        (PLACE,),
        ("What time is it in {0}?", "What's the time in {0}?", "Tell me the time in {0}."),
    ),
    (
        row("multiply mul multiply_numbers times product"),
        ("Multiply two numbers.", "Useful for multiplying two numbers.", "Multiply a and b."),
        TERMS,
        ("What is {0} * {1}?", "Multiply {0} by {1}.", "What is {0} times {1}?", "{0} * {1} = ?"),
    ),
    (
        row("add sum add_numbers plus addition"),
        ("Add two numbers.", "Useful for adding two numbers.", "Returns the sum"),
        TERMS,
        ("What is {0} + {1}?", "Add {0} and {1}.", "What's {0} plus {1}?", "Sum {0} and {1}."),
    ),
    (
        row("subtract minus difference sub"),
        ("Subtract two numbers.", "Returns the difference", "Subtract b from a."),
        TERMS,
        ("What is {0} - {1}?", "What's {0} minus {1}?", "{0} - {1} = ?"),
    ),
    (
        row("find_age get_age lookup_age age_of"),
        ("Find the age of a person.", "Get the age of a user", "Look up somebody's age."),
        (PERSON,),
        ("How old is {0}?", "What is the age of {0}?", "Tell me how old {0} is."),
    ),
    (
        row("search web_search search_web google lookup search_docs retrieve"),
        ("Search the web.", "Searches for information", "Search the documents for a query."),
        ((row("query q search_query text question"), "topic"),),
        ("Search for {0}.", "Look up {0}.", "Find something about {0}.", "Search the web for {0}."),
    ),
    (
        row("send_email email sendEmail send_mail"),
        ("Send an email.", "Sends an email to somebody"),
        ((row("to recipient address email"), "email"), (row("subject title topic"), "topic")),
        ("Send an email to {0} about {1}.", "Email {0} with the subject {1}."),
    ),
    (
        row("send_message message text_person notify"),
        ("Send a message to a person.", "Sends somebody a text"),
        ((row("to recipient name person"), "person"), (row("message text body content"), "topic")),
        ("Send {0} the message {1}.", "Tell {0}: {1}", "Text {0} about {1}."),
    ),
    (
        row("get_stock_price stock_price getPrice quote"),
        ("Get the price of a stock.", "Returns the stock price of a ticker"),
        ((row("symbol ticker stock code"), "code"),),
        ("What is the price of {0}?", "What's the stock price of {0}?", "How much is {0}?"),
    ),
    (
        row("set_timer start_timer timer setTimer"),
        ("Set a timer.", "Starts a timer for some minutes"),
        ((row("minutes duration mins length"), "number"),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Timer, {0} minutes"),
    ),
    (
        row("turn_on_light light_on switch_light lightsOn"),
        ("Turn on the light in a room.", "Switches a light on"),
        ((row("room place where location"), "room"),),
        ("Turn on the light in the {0}.", "Switch on the light in the {0}.", "Light the {0}."),
    ),
    (
        row("translate translate_text translator"),
        ("Translate a text into a language.", "Translates text"),
        ((row("text phrase word input"), "topic"), (row("language target lang to"), "language")),
        ("Translate {0} into {1}.", "How do you say {0} in {1}?", "What is {0} in {1}?"),
    ),
    (
        row("read_file open_file readFile cat load_file"),
        ("Read a file.", "Returns the content of a file", "Read a file from disk."),
        ((row("path file filename file_path"), "file"),),
        ("Read {0}.", "Open the file {0}.", "What is in {0}?", "Show me {0}."),
    ),
    (
        row("create_event add_event schedule createEvent"),
        ("Create an event in the calendar.", "Adds a calendar entry"),
        ((row("title name event what"), "topic"), (row("day date when"), "day")),
        ("Put {0} into my calendar on {1}.", "Schedule {0} for {1}.", "Add {0} on {1}."),
    ),
    (
        row("book_flight find_flights search_flights bookFlight"),
        ("Book a flight from one city to another.", "Search flights"),
        ((row("origin from_city source start"), "place"), (row("destination to_city to"), "place")),
        ("Book a flight from {0} to {1}.", "Find flights from {0} to {1}.", "Fly me {0} to {1}."),
    ),
    (
        row("order_status get_order track_order check_order"),
        ("Get the status of an order.", "Looks up an order", "Track an order."),
        ((row("order_id id order number"), "code"),),
        ("Where is my order {0}?", "What is the status of order {0}?", "Track order {0}."),
    ),
    (
        row("get_population population city_population"),
        ("Get the population of a city.", "How many people live in a place"),
        (PLACE,),
        ("How many people live in {0}?", "What is the population of {0}?"),
    ),
    (
        row("get_user find_user lookup_user getUser find_person"),
        ("Find a user by name.", "Look up a person", "Get what is known of a customer"),
        (PERSON,),
        ("Who is {0}?", "Find {0}.", "Look up {0}.", "Tell me about {0}."),
    ),
)
VERBS = row(
    """book buy call cancel check clean close copy count cut delete draw fetch find fix get give
    hide keep list load lock make mark measure move open order paint pay plan play print push read
    record rent repair save sell send share show sort start stop store test track update wash"""
)
ENDINGS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (*PLACE, (" in {}", " at {}")),
    (*PERSON, (" for {}", " of {}", " with {}")),
    (row("count amount quantity n limit number"), "number", (", {} of them", " {} times")),
    (row("day date when"), "day", (" on {}",)),
    (row("id code key number reference"), "code", (" {}", " with the code {}", " number {}")),
    (row("topic title subject text note"), "topic", (" about {}", " called {}")),
    (row("color colour hue"), "hue", (" in {}",)),
    (row("path file filename"), "file", (" from {}", " to {}", " in {}")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool with its arguments, their right values, and a question that needs it.

    `kinds` are the kinds of the arguments' values. `ask` builds a question from values, so that the
    tool can be used for several questions.
    """

    name: str
    about: str
    fields: list[Field]
    question: str
    kinds: tuple[str, ...] = ()
    ask: Callable[[random.Random, list[object]], str] | None = None

    def right_call(self) -> str:
        """Return the right call; arguments with a default are omitted."""
        return call(self.name, {f.name: f.value for f in self.fields if f.default is None})

    def schema(self, rng: random.Random) -> dict[str, object]:
        """Return the tool in OpenAI's format, in a random client's style."""
        return function(rng, self.name, self.about, self.fields)

    def with_new_question(self, rng: random.Random) -> "Tool":
        """Return the same tool with new values and a new question."""
        assert self.ask is not None
        values = [VALUES[kind][1](rng) for kind in self.kinds]
        fields = [replace(f, value=value) for f, value in zip(self.fields, values)]
        question = typed(rng, self.ask(rng, values))
        return replace(self, fields=[*fields, *self.fields[len(fields) :]], question=question)


def draw_fields(rng: random.Random, slots: Slots) -> list[Field]:
    """Draw the fields of a tool, without values; names are unique."""
    fields: list[Field] = []
    for names, kind in slots:
        used_names = {field.name for field in fields}
        name = rng.choice([name for name in names if name not in used_names])
        if rng.random() < 0.1:
            name = rng.choice((f"{invented(rng)}_{name}", f"the_{name}", invented(rng)))
        description = rng.choice(
            (f"The {name.replace('_', ' ')}.", f"the {kind} to use", f"A {kind}")
        )
        fields.append(Field(name=name, value=None, kind=VALUES[kind][0], description=description))
    return fields


def option(rng: random.Random) -> Field:
    """Draw an optional argument, which no question mentions."""
    name, choices = rng.choice(
        (
            ("unit", ("celsius", "fahrenheit")),
            ("format", ("text", "json")),
            ("mode", ("fast", "slow")),
            (invented(rng), (invented(rng), invented(rng))),
        )
    )
    shown = choices if rng.random() < 0.6 else ()
    return Field(
        name=name, value=choices[0], choices=shown, default=choices[0], description=f"The {name}"
    )


def tutorial_tool(rng: random.Random) -> Tool:
    """Draw a tool of a tutorial."""
    names, about, slots, questions = rng.choice(
        (*TUTORIAL_TOOLS, TUTORIAL_TOOLS[0], TUTORIAL_TOOLS[0])
    )
    return Tool(
        name=rng.choice(names),
        about=rng.choice(about),
        fields=draw_fields(rng, slots),
        question="",
        kinds=tuple(kind for _, kind in slots),
        ask=lambda rng, values: rng.choice(questions).format(*values),
    )


LEADS = ("", "", "Please ", "Can you ", "I want to ", "Could you please ")


def composed_tool(rng: random.Random) -> Tool:
    """Draw a tool of a verb and a thing with up to three arguments, e.g. "check_invoice"."""
    verb = rng.choice(VERBS) if rng.random() < 0.85 else invented(rng)
    thing = rng.choice((rng.choice(TOPICS), rng.choice(JOBS), rng.choice(words.NOUNS)))
    thing = thing if rng.random() < 0.7 else invented(rng)
    endings = rng.sample(ENDINGS, rng.choice((1, 1, 1, 1, 2, 2, 3)))

    def ask(rng: random.Random, values: list[object]) -> str:
        suffix = "".join(
            rng.choice(texts).format(value)
            for (_, _, texts), value in zip(endings, values, strict=True)
        )
        lead, article = rng.choice(LEADS), rng.choice(("the ", "a ", ""))
        question = f"{lead}{verb} {article}{thing}{suffix}{'?' if lead.startswith('C') else '.'}"
        return question[0].upper() + question[1:]

    name = rng.choice((f"{verb}_{thing}", f"{verb}{thing.title()}", f"{thing}_{verb}"))
    about = rng.choice((f"{verb} a {thing}", f"{verb}s the {thing}", f"Use this to {verb} {thing}"))
    return Tool(
        name=name if rng.random() < 0.9 else verb,
        about=about[0].upper() + about[1:] + rng.choice((".", "")),
        fields=draw_fields(rng, tuple((names, kind) for names, kind, _ in endings)),
        question="",
        kinds=tuple(kind for _, kind, _ in endings),
        ask=ask,
    )


def some_tool(rng: random.Random) -> Tool:
    """Draw a tool with its question, sometimes with an optional argument."""
    tool = tutorial_tool(rng) if rng.random() < 0.5 else composed_tool(rng)
    fields = [*tool.fields, option(rng)] if rng.random() < 0.1 else tool.fields
    return replace(tool, fields=fields).with_new_question(rng)


def some_tools(rng: random.Random, count: int) -> list[Tool]:
    """Draw tools with distinct names and descriptions."""
    tools: list[Tool] = []
    while len(tools) < count:
        tool = some_tool(rng)
        if not any(tool.name == other.name or tool.about == other.about for other in tools):
            tools.append(tool)
    return tools


def both(first: str, second: str) -> str:
    """Join two calls to one answer, as the chat template does."""
    assert first.startswith(TOOL_OPEN) and first.endswith(TOOL_CLOSE)
    return f"{first}\n{second}"
