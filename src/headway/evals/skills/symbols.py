"""Skills on numbers and letters: arithmetic, sort, copy, reverse, count.

Each function takes a level, 1 to 3, and returns an example with one right answer. A level is a
size: `docs/skills.md` has the table.
"""

import random

from headway.evals.skills.example import Example, phrased

ALPHABET = "abcdefghijklmnopqrstuvwxyz"

SUM = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a}+{b}",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
)
DIFFERENCE = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a}-{b}",
    "Take {b} from {a}.",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
)
PRODUCT = (
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "{a} * {b}",
    "{a} * {b} = ?",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
)


def arithmetic(rng: random.Random, level: int) -> Example:
    """Add or subtract numbers of one, two or three digits; level 3 also multiplies one-digit
    numbers."""
    low, high = ((0, 9), (10, 99), (100, 999))[level - 1]
    a, b = rng.randint(low, high), rng.randint(low, high)
    kind = rng.choice("+++--" if level < 3 else "++-*")
    if kind == "+":
        prompt, value = phrased(rng, SUM, a=a, b=b), a + b
    elif kind == "-":
        a, b = max(a, b), min(a, b)
        prompt, value = phrased(rng, DIFFERENCE, a=a, b=b), a - b
    else:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        prompt, value = phrased(rng, PRODUCT, a=a, b=b), a * b
    return Example(prompt=prompt, answer=f"{a} {kind} {b} = {value}.")


SORT = (
    "Sort these numbers: {items}",
    "Sort: {items}",
    "Sort the numbers {items}.",
    "Put these numbers in order: {items}",
    "Put in order, smallest first: {items}",
    "Please sort {items}.",
    "Order these from small to large: {items}",
)


def sort(rng: random.Random, level: int) -> Example:
    """Sort three numbers below 10; three to five below 100; six to eight below 1000."""
    limit, shortest, longest = ((10, 3, 3), (100, 3, 5), (1000, 6, 8))[level - 1]
    numbers = [rng.randrange(limit) for _ in range(rng.randint(shortest, longest))]
    prompt = phrased(rng, SORT, items=", ".join(map(str, numbers)))
    return Example(prompt=prompt, answer=", ".join(map(str, sorted(numbers))))


def letters(rng: random.Random, shortest: int, longest: int) -> list[str]:
    return [rng.choice(ALPHABET) for _ in range(rng.randint(shortest, longest))]


COPY = (
    "Copy: {items}",
    "Copy these letters: {items}",
    "Repeat: {items}",
    "Repeat these letters: {items}",
    "Please repeat: {items}",
    "Repeat after me: {items}",
    "Say these letters again: {items}",
)


def copy(rng: random.Random, level: int) -> Example:
    """Copy up to 8, 16 and 32 letters."""
    items = " ".join(letters(rng, *((2, 8), (9, 16), (17, 32))[level - 1]))
    return Example(prompt=phrased(rng, COPY, items=items), answer=items)


REVERSE = (
    "Reverse: {items}",
    "Reverse the letters: {items}",
    "Reverse these letters: {items}",
    "Please reverse: {items}",
    "Write these letters backwards: {items}",
    "Say these letters in reverse: {items}",
)


def reverse(rng: random.Random, level: int) -> Example:
    """Reverse up to 5, 9 and 16 letters."""
    items = letters(rng, *((2, 5), (6, 9), (10, 16))[level - 1])
    prompt = phrased(rng, REVERSE, items=" ".join(items))
    return Example(prompt=prompt, answer=" ".join(reversed(items)))


COUNT = (
    "How many times is the letter {letter} in {items}?",
    "Count the letter {letter} in: {items}",
    "Count the letter {letter}: {items}",
    "How many {letter} are there in {items}?",
    "How often is the letter {letter} in: {items}",
)


def count(rng: random.Random, level: int) -> Example:
    """Count a letter among up to 6, 12 and 24; it makes up a third of them."""
    shortest, longest = ((3, 6), (7, 12), (13, 24))[level - 1]
    letter, other = rng.sample(ALPHABET, 2)
    choices = (letter, other, rng.choice(ALPHABET))
    items = [rng.choice(choices) for _ in range(rng.randint(shortest, longest))]
    prompt = phrased(rng, COUNT, letter=letter, items=" ".join(items))
    return Example(prompt=prompt, answer=str(items.count(letter)))
