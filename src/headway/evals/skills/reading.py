"""Skills that find something in a text or chat: lookup, recall, refuse, classify.

Each function takes a level, 1 to 3, and returns an example with one right answer. A level is the
amount of text and how far back the answer is: `docs/skills.md` has the table.
"""

import random

from headway.evals.skills import words
from headway.evals.skills.example import Example, Turn, phrased, typed
from headway.evals.skills.stories import story

FILLER_CHARACTERS = 6200
"""About 1,600 tokens of stories; with the list and the question they stay below 2,048."""

LIST = (
    "Remember this list: {items}.",
    "Here is a list: {items}.",
    "List: {items}.",
    "These are the numbers: {items}.",
)
LOOKUP = (
    "What is the number of {key}?",
    "Which number has {key}?",
    "What number belongs to {key}?",
    "Look up {key}.",
    "Tell me the number of {key}.",
)


def filler(rng: random.Random, num_characters: int) -> str:
    """Return stories that are cut at the end of a sentence, at most `num_characters` long."""
    text = ""
    while len(text) < num_characters:
        text += story(rng, rng.choice(words.HEROES)) + " "
    end = text.rfind(". ", 0, num_characters)
    return text[: end + 1] if end > 0 else ""


def lookup(rng: random.Random, level: int) -> Example:
    """Look up 4 pairs, 8 to 16, and 16 with up to 1,600 tokens of stories after the list.

    There may be several questions about the list; all but the last are earlier turns.
    """
    num_pairs = (4, rng.randint(8, 16), 16)[level - 1]
    table = {key: rng.randint(10, 99) for key in rng.sample(words.NOUNS, num_pairs)}
    text = rng.choice(LIST).format(items=", ".join(f"{k}: {v}" for k, v in table.items()))
    if level == 3:
        text += "\n\n" + filler(rng, rng.randint(0, FILLER_CHARACTERS))
    keys = rng.sample(list(table), rng.choice((1, 2, 3)))
    turns = [(phrased(rng, LOOKUP, key=key), f"Found {key}: {table[key]}") for key in keys]
    turns[0] = (f"{text}\n{turns[0][0]}", turns[0][1])
    prompt, answer = turns[-1]
    return Example(prompt=prompt, answer=answer, before=tuple(turns[:-1]))


def lookup_at(rng: random.Random, num_characters: int) -> Example:
    """Look up one of 16 pairs, with `num_characters` of stories between list and question."""
    table = {key: rng.randint(10, 99) for key in rng.sample(words.NOUNS, 16)}
    text = rng.choice(LIST).format(items=", ".join(f"{k}: {v}" for k, v in table.items()))
    if num_characters:
        text += "\n\n" + filler(rng, num_characters)
    key = rng.choice(list(table))
    return Example(
        prompt=f"{text}\n{phrased(rng, LOOKUP, key=key)}", answer=f"Found {key}: {table[key]}"
    )


FACTS = (
    (
        "name",
        words.NAMES,
        ("My name is {x}.", "I am {x}.", "Hello, I am {x}.", "Hi! My name is {x}."),
        "Hello, {x}! Nice to meet you.",
        ("What is my name?", "Do you know my name?", "Who am I?", "Can you tell me my name?"),
        "Your name is {x}.",
    ),
    (
        "colour",
        words.HUES,
        ("My favourite colour is {x}.", "I like the colour {x} best."),
        "{x} is a fine colour.",
        ("What is my favourite colour?", "Which colour do I like best?"),
        "Your favourite colour is {x}.",
    ),
    (
        "pet",
        words.CREATURES,
        ("I have a {x}.", "My pet is a {x}."),
        "I would like to see your {x}.",
        ("What pet do I have?", "What is my pet?"),
        "Your pet is a {x}.",
    ),
    (
        "home",
        words.TOWNS,
        ("I live in {x}.", "My home is in {x}."),
        "I have heard of {x}.",
        ("Where do I live?", "Where is my home?"),
        "You live in {x}.",
    ),
    (
        "wish",
        words.NOUNS,
        ("I want to buy a {x}.", "I wish I had a {x}."),
        "I hope you find a good {x}.",
        ("What do I want to buy?", "What do I wish for?"),
        "You want a {x}.",
    ),
)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def recall(rng: random.Random, level: int) -> Example:
    """Recall a fact of the last turn, one of two facts with small talk, one of four with more of
    it.

    At level 3 a fact may be stated twice with different values; the later one counts.
    """
    num_facts, num_fillers = ((1, 0), (2, 2), (4, 3))[level - 1]
    facts = [(fact, rng.choice(fact[1])) for fact in rng.sample(FACTS, num_facts)]
    statements = list(facts)
    if level == 3 and rng.random() < 0.5:
        fact = facts[rng.randrange(num_facts)][0]
        statements.append((fact, rng.choice(fact[1])))
    turns: list[Turn] = [
        (typed(rng, rng.choice(fact[2]).format(x=x)), capital(fact[3].format(x=x)))
        for fact, x in statements
    ]
    for _ in range(num_fillers):
        turns.insert(rng.randint(1, len(turns)), words.INTERLUDES[rng.randrange(12)])
    target = rng.choice(facts)[0]
    value = next(x for fact, x in reversed(statements) if fact is target)
    return Example(
        prompt=typed(rng, rng.choice(target[4])),
        answer=target[5].format(x=value),
        before=tuple(turns),
    )


READ = (
    "Text: {text}\nQuestion: {question}",
    "Read this: {text}\n{question}",
    "{text}\n{question} Answer from the text.",
    "Answer from the text only.\n{text}\n{question}",
)
UNSAID = "The text does not say."


def refuse(rng: random.Random, level: int) -> Example:
    """Answer from one, three or six sentences; the text answers only half of the questions."""
    num_sentences = (1, 3, 6)[level - 1]
    names = rng.sample(words.NAMES, num_sentences + 1)
    things = rng.sample(words.NOUNS, num_sentences + 1)
    hues = [rng.choice(words.HUES) for _ in names]
    sentences = [
        f"{n} has a {h} {t}." for n, h, t in zip(names[1:], hues[1:], things[1:], strict=True)
    ]
    subject = rng.randint(1, num_sentences)
    if rng.random() < 0.5:
        name, thing, answer = names[subject], things[subject], f"{capital(hues[subject])}."
    else:
        name, thing = rng.choice(((names[0], things[subject]), (names[subject], things[0])))
        answer = UNSAID
    question = f"What colour is the {thing} of {name}?"
    return Example(
        prompt=phrased(rng, READ, text=" ".join(sentences), question=question), answer=answer
    )


CLASSIFY = (
    "Is this {labels}? {text}",
    "Classify as {labels}: {text}",
    "Label this as {labels}: {text}",
    "Which label fits, {labels}? {text}",
)


def classify(rng: random.Random, level: int) -> Example:
    """Classify praise or blame, a thing by four kinds, praise or blame with negation."""
    if level == 2:
        label = rng.choice(list(words.KINDS))
        labels, text = rng.sample(list(words.KINDS), 4), rng.choice(words.KINDS[label])
    else:
        labels = rng.sample(("positive", "negative"), 2)
        good = rng.random() < 0.5
        negated = level == 3 and rng.random() < 0.6
        adjective = rng.choice(words.PRAISE if good != negated else words.BLAME)
        verb = rng.choice(("was", "is", "seemed")) + (" not" if negated else "")
        very = rng.choice(("", "", "very ", "really "))
        text = f"The {rng.choice(words.REVIEWED)} {verb} {very}{adjective}."
        label = "positive" if good else "negative"
    options = ", ".join(labels[:-1]) + f" or {labels[-1]}"
    return Example(prompt=phrased(rng, CLASSIFY, labels=options, text=text), answer=label)
