"""Compilation of a grammar's text to a matcher, or to an error that names what is unsupported.

llguidance compiles; this module has the input for each kind, the limits, and the meaning of its
errors for a client: the schema keyword at fault, or the message itself.
"""

import json
import re
from collections.abc import Callable

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from headway.core.errors import RequestError
from headway.core.grammar import WHITESPACE, Grammar

LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
"""Bounds the time of a step; a state of the lexer takes 1 to 2 kB."""
MAX_MESSAGE = 300
WORD_BITS, WORD_BYTES = 32, 4


def num_words(vocab_size: int) -> int:
    """Return the 32-bit words of a mask: 16 for 512 tokens, 17 for 513."""
    return -(-vocab_size // WORD_BITS)


def of_schema(text: str) -> str:
    options = {"whitespace_pattern": WHITESPACE}
    return str(LLMatcher.grammar_from_json_schema(text, overrides=options))  # type: ignore[arg-type]


def of_choice(text: str) -> str:
    """Return a grammar of alternatives: ["yes", "no"] → start: "yes" | "no"."""
    choices = [json.dumps(item, ensure_ascii=False) for item in msgspec.json.decode(text)]
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(choices)))


SOURCES: dict[str, Callable[[str], str]] = {
    "json": of_schema,
    "json_object": lambda _: of_schema('{"type":"object"}'),
    "regex": LLMatcher.grammar_from_regex,
    "choice": of_choice,
    "lark": LLMatcher.grammar_from_lark,
    "structural": LLMatcher.grammar_from_lark,
}
KEYWORDS: list[tuple[str, str, str]] = [
    (r"Unimplemented keys: \[(?P<names>.*?)\]", "", ""),
    (r"oneOf constraints are not supported", "oneOf", "where its branches may overlap"),
    (r"Unknown format: (?P<value>.*)", "format", "with this value"),
    (r"min/maxProperties", "minProperties", "beside properties that are optional"),
    (r"patternProperty regexes", "patternProperties", "where two patterns match the same name"),
    (r"not present in a registry", "$ref", "to another document"),
    (r"circular references", "$ref", "in a circle with other keywords beside it"),
    (r"look-?around|backreference", "pattern", "with look-around or back-references"),
    (r"Unable to determine if regex", "pattern", "in a combination this large"),
    (r"[Ff]ailed to generate regex for \w+ range", "minimum", "and maximum this far apart"),
]
"""(message of llguidance, the keyword it concerns, the case that is not supported)."""
WITH_PATTERNS = ("json", "structural")
"""Kinds whose regular expressions are those of a schema's `pattern`."""


def gbnf_as_lark(grammar: Grammar) -> Grammar:
    """Convert a GBNF grammar to Lark; others stay. Raises RequestError.

    root ::= "yes" | "no" → start: "yes" | "no". The converter is Python code, so only the trial
    process runs it.
    """
    if grammar.kind != "gbnf":
        return grammar
    try:
        text = gbnf_to_lark(grammar.text)
    except Exception as error:  # the converter raises bare Exception
        raise refusal(grammar, str(error) or type(error).__name__) from error
    return Grammar(kind="lark", text=text, param=grammar.param)


def compile_grammar(vocabulary: LLTokenizer, grammar: Grammar) -> tuple[LLMatcher, bytes]:
    """Return a matcher at the start of `grammar`, and the first token's mask; RequestError."""
    try:
        source = SOURCES[grammar.kind](grammar.text)
    except (ValueError, RecursionError) as error:
        raise refusal(grammar, str(error)) from error
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    first_mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    return matcher, first_mask[: num_words(vocabulary.vocab_size) * WORD_BYTES]


def refusal(grammar: Grammar, message: str) -> RequestError:
    """Return the 400 for a message of llguidance."""
    keyword = keyword_error(grammar, message)
    if keyword is not None:
        return keyword
    return RequestError(
        f"{grammar.param} cannot be honoured: {format_message(message)}.",
        param=grammar.param,
        code="invalid_value",
    )


def keyword_error(grammar: Grammar, message: str) -> RequestError | None:
    """Return the error that names the schema keyword at fault, if the message tells it."""
    for pattern, keyword, where in KEYWORDS:
        match = re.search(pattern, message)
        if match is None or (keyword == "pattern" and grammar.kind not in WITH_PATTERNS):
            continue
        named = match.groupdict()
        if "names" in named:
            keyword = ", ".join(re.findall(r'"([^"]*)"', named["names"]))
        value = f" {named['value'][:60]!r}" if "value" in named else ""
        return RequestError(
            f"The schema keyword {keyword[:200]}{value} is not supported{where and ' '}{where}.",
            param=grammar.param,
            code="unsupported_keyword",
        )
    return None


def format_message(message: str) -> str:
    """Format a message of llguidance on one line, without the parser's state."""
    for end in ("<state>", "<non-verbose/>"):
        message = message.partition(end)[0]
    return " ".join(message.split())[:MAX_MESSAGE].rstrip(".") or "the grammar has no answer"
