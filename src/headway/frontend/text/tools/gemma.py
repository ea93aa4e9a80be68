"""Gemma's tool calls: call:name{key:value, …} between marks, strings between own marks, no quotes.

FunctionGemma writes <start_function_call>call:f{city:<escape>Rome<escape>}<end_function_call>,
Gemma 4 <|tool_call>call:f{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>. The arguments are converted
to JSON: {"city": "Rome", "days": [1, 2]}.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from headway.frontend.text.source import IN_SCALAR, SCALAR, TextSource, Wait

KEY = re.compile(r"[^:{}\[\],\"<\s]*")
NAME = re.compile(r"[\w.:-]*")
PREFIX = "call:"
CLOSES = {"{": "}", "[": "]"}
LITERALS = ("true", "false", "null")


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """Marks that open and close a call, and the mark around a string."""

    open: str
    close: str
    quote: str

    def parse(self, source: TextSource) -> Wait[None]:
        """Parse a whole answer."""
        marker = yield from source.until((self.open,), source.content)
        while marker:
            source.hold(marker)
            if (yield from self.call(source)):
                marker = yield from source.until((self.close, self.open), len)
                if marker == self.open:
                    continue
            else:
                source.show()
            marker = yield from source.until((self.open,), source.content)

    def call(self, source: TextSource) -> Wait[bool]:
        """Parse call:name{…}; return False if this is none."""
        name: list[str] = []
        yield from source.skip_space()
        if not (yield from source.accept(PREFIX)):
            return False
        yield from source.skip_space()
        yield from source.run(NAME, name.append)
        yield from source.skip_space()
        if not any(name) or not (yield from source.sees("{")):
            return False
        write = source.begin_call("".join(name))
        source.end_call((yield from self.value(source, write)))
        return True

    def value(self, source: TextSource, write: Callable[[str], None]) -> Wait[bool]:
        """Write one value as JSON; return False if it is cut off."""
        closers: list[str] = []
        while True:
            char = yield from source.peek()
            first = char in CLOSES
            if first:
                closers.append(CLOSES[char])
                write(source.skip(1))
            elif closers and char == closers[-1]:
                write(closers.pop())
                source.skip(1)
            elif not (yield from self.atom(source, write)):
                return False
            if not closers:
                return True
            if not (yield from self.next_item(source, write, closers[-1], first)):
                return False

    def next_item(
        self, source: TextSource, write: Callable[[str], None], closer: str, first: bool
    ) -> Wait[bool]:
        """Write the text before the next value: a comma, and a key in an object."""
        yield from source.skip_space()
        if (yield from source.peek()) == closer:
            return True
        if not first:
            if not (yield from source.accept(",")):
                return False
            write(", ")
            yield from source.skip_space()
        return closer == "]" or (yield from self.key(source, write))

    def key(self, source: TextSource, write: Callable[[str], None]) -> Wait[bool]:
        """Write a key and its colon: city: or <escape>city<escape>: → "city": ."""
        name: list[str] = []
        if (yield from source.accept(self.quote)):
            yield from source.until((self.quote,), name.append)
        elif (yield from source.peek()) == '"':
            name.append((yield from source.decoded_string()) or "")
        else:
            yield from source.run(KEY, name.append)
        yield from source.skip_space()
        if not any(name) or not (yield from source.accept(":")):
            return False
        write(json.dumps("".join(name), ensure_ascii=False) + ": ")
        yield from source.skip_space()
        return True

    def atom(self, source: TextSource, write: Callable[[str], None]) -> Wait[bool]:
        """Write a string, a number, true, false or null; return False if there is none."""
        if (yield from source.accept(self.quote)):
            write('"')
            closed = yield from source.until((self.quote,), lambda text: write(escaped(text)))
            write('"' if closed else "")
            return bool(closed)
        char = yield from source.peek()
        if char == '"':
            return (yield from source.string(write))
        word: list[str] = []
        if char and IN_SCALAR.match(char):
            yield from source.run(SCALAR, word.append)
        if not any(word):
            return False
        write(plain("".join(word)))
        return True


def escaped(text: str) -> str:
    """Return text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def plain(word: str) -> str:
    """Return a bare word as JSON: numbers, true, false and null unchanged, others as a string."""
    if word in LITERALS or re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", word):
        return word
    return json.dumps(word, ensure_ascii=False)


FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')
