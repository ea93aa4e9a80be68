"""Numbers of generated JSON end, though the model would write digits for ever."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_tokenizer import EOS, write_tokenizer
from grammar_engine import VOCAB
from headway.core import grammar as grammars
from headway.core.clock import SystemClock
from headway.core.grammar import Grammar
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.state import GrammarState
from headway.engine.grammar.vocabulary import VocabularySource
from headway.frontend.text import Tokenizer
from headway.frontend.text.tools import BY_NAME
from headway.frontend.text.tools.written import OfferedTool, calls_grammar

MOST = 120
"""Tokens of an answer; a number's longest form, of three rows of digits, is half as long."""


@dataclass
class Row:
    """A sequence, as masks see it."""

    grammar: GrammarState
    tokens: list[int]
    sequence_id: int = 1
    num_prompt: int = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("digits")
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def made(folder: Path) -> Iterator[Grammars]:
    source = VocabularySource(str(folder), VOCAB, (EOS,))
    compiles = Grammars(source, clock=SystemClock(), limit_s=5.0)
    yield compiles
    compiles.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def state_of(made: Grammars, grammar: Grammar) -> GrammarState:
    compiled = made.compile(1, grammar)
    while compiled is None:
        made.wait(1.0)
        for _, outcome in made.ready():
            assert not isinstance(outcome, Exception), outcome
            compiled = outcome
    return compiled.state()


def allowed(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(token) for token in bits.nonzero()[0]]


def written(made: Grammars, tokenizer: Tokenizer, grammar: Grammar, seed: int = 0) -> str:
    """What a model writes that takes a digit where it may, the longest token first."""
    draw = random.Random(seed)
    row = Row(state_of(made, grammar), [40, 17])  # a prompt that ends with a digit
    state, text = row.grammar, b""
    for _ in range(MOST):
        (mask,) = made.begin([(row, [])]).finish().by_sequence[1]  # type: ignore[list-item]
        may = allowed(mask)
        pieces = {token: tokenizer.piece(token) for token in may if token != EOS}
        digits = [token for token, piece in pieces.items() if piece[:1].isdigit()]
        token = draw.choice(digits or may)
        assert state.accept(token)
        row.tokens.append(token)
        if token == EOS:
            break
        text += pieces[token]
        if state.is_complete:
            break
    return text.decode()


def schema(**fields: Any) -> Grammar:
    return grammars.json_schema({"type": "array", "minItems": 2, "maxItems": 2, **fields}, "f")


NUMBERS: list[dict[str, Any]] = [
    {"type": "number", "minimum": 0.1, "maximum": 0.25},
    {"type": "number"},
    {"type": "integer"},
    {"type": "integer", "minimum": 7},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "multipleOf": 0.5},
    {"type": ["number", "null"]},
    {},
]


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_no_number_has_more_than_twenty_digits_in_a_row(
    made: Grammars, tokenizer: Tokenizer, kind: dict[str, Any]
) -> None:
    for seed in range(3):
        text = written(made, tokenizer, schema(items=kind), seed)
        assert len(json.loads(text)) == 2
        assert max(map(len, re.findall(r"\d+", text))) == 20, text


def test_a_number_alone_ends_too(made: Grammars, tokenizer: Tokenizer) -> None:
    text = written(made, tokenizer, grammars.json_schema(NUMBERS[0], "f"))
    assert 0.1 <= json.loads(text) <= 0.25 and len(text) < 25


def test_the_arguments_of_a_forced_call_end_too(made: Grammars, tokenizer: Tokenizer) -> None:
    parameters = {"properties": {"n": {"type": "number"}}, "required": ["n"]}
    offered = [OfferedTool(name="f", schema=parameters)]
    text = calls_grammar(BY_NAME["hermes"].written, offered, forced=True, several=False)
    call = written(made, tokenizer, Grammar(kind="structural", text=text))
    assert call.endswith("</tool_call>") and max(map(len, re.findall(r"\d+", call))) == 20


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (schema(items={"const": 10**29}), r"10{29}"),
        (schema(items={"type": "string", "pattern": "^[0-9]{30}$"}), r"\d{30}"),
        (grammars.regex("[0-9]{40,60},", "f"), r"\d{60}"),
        (grammars.regex("[0-9]{1,60},?", "f"), r"\d{60}"),
        (grammars.context_free("start: /[0-9]{1,60}/", "f"), r"\d{60}"),
    ],
    ids=str,
)  # fmt: skip
def test_what_must_be_longer_is_longer_and_other_grammars_are_kept_to_the_letter(
    made: Grammars, tokenizer: Tokenizer, grammar: Grammar, pattern: str
) -> None:
    assert re.search(pattern, written(made, tokenizer, grammar))


def test_a_mask_behind_a_draft_counts_the_draft(made: Grammars, tokenizer: Tokenizer) -> None:
    state = state_of(made, schema(items=NUMBERS[0]))
    row = Row(state, [40, 17])
    ids = tokenizer.encode("[0." + "1" * 30, add_special_tokens=False)
    first = len(tokenizer.encode("[0.", add_special_tokens=False))
    made.begin([(row, [])]).finish()
    for token in ids[:first]:
        assert state.accept(token)
        row.tokens.append(token)
    masks = made.begin([(row, ids[first:])]).finish().by_sequence[1]  # type: ignore[list-item]
    ones = tokenizer.encode("1", add_special_tokens=False)
    may = [ones[0] in allowed(mask) for mask in masks]
    assert may[:20] == [True] * 20 and not any(may[20:])


def test_white_space_is_bounded(made: Grammars, tokenizer: Tokenizer) -> None:
    """A model that takes white space wherever it may has at most a line's indentation of it."""
    row = Row(state_of(made, schema(items={"type": "integer"})), [40, 17])
    state, longest, spaces = row.grammar, 0, 0
    for _ in range(MOST):
        (mask,) = made.begin([(row, [])]).finish().by_sequence[1]  # type: ignore[list-item]
        may = allowed(mask)
        blank = [token for token in may if token != EOS and tokenizer.piece(token).isspace()]
        token = (blank or may)[0]
        spaces = spaces + 1 if blank else 0
        longest = max(longest, spaces)
        assert state.accept(token)
        row.tokens.append(token)
        if state.is_complete:
            break
    assert 0 < longest <= 34
