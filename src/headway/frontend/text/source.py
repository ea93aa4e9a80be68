"""Incremental text, for parsers written as if the whole text were there.

A parser is a generator: it yields where it needs more text and is resumed when more has arrived. It
decides only by the text, never by where the text was cut, so any split gives the same parts; text
that is still ambiguous is held back. Example, a parser that looks for "<tool_call>":

    feed "Hello <to"     ContentPart("Hello")      "<to" may begin a call, so the space waits too
    feed "day>"          ContentPart(" <today>")   it was no call
"""

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import cache
from typing import Any, TypeVar

from headway.frontend.text.parts import (
    CallArguments,
    CallBegins,
    CallEnds,
    ContentPart,
    Part,
    Reasoning,
)

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Part of a parser: a generator that yields while it waits for text, and returns a T."""

SPACE = re.compile(r"\s*")
PLAIN = re.compile(r'[^"\\]*')
BETWEEN = re.compile(r"[\s,:]*")
IN_SCALAR = re.compile(r"[-+.\w]")
SCALAR = re.compile(r"[-+.\w]*")
CLOSES = {"{": "}", "[": "]"}


class TextSource:
    """The text, a position in it, and the parts made so far."""

    def __init__(
        self,
        new_id: Callable[[], str],
        offered: frozenset[str] = frozenset(),
        *,
        only_calls: bool = False,
        schemas: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.offered = offered
        """Names of the tools that may be called."""
        self.schemas = schemas or {}
        """Tool → schema of its arguments, for formats that write strings without quotes."""
        self._only_calls = only_calls
        """Whether a grammar forces calls, so that there is no content."""
        self.ended = False
        self.num_calls = 0
        self._new_id = new_id
        self._text = ""
        self._at = 0
        self._held_from: int | None = None
        self._space = ""
        self._open = False
        self._parts: list[Part] = []

    # ── the two ends ────────────────────────────────────────────────────────────────────────

    def feed(self, text: str, last: bool = False) -> None:
        """Add text; `last` marks the end."""
        begin = self._at if self._held_from is None else self._held_from
        self._text = self._text[begin:] + text
        self._at -= begin
        self._held_from = None if self._held_from is None else 0
        self.ended = last

    def take(self) -> list[Part]:
        """Return the parts since the last call, neighbours of one kind joined."""
        parts, self._parts = self._parts, []
        return joined(parts)

    # ── looking ─────────────────────────────────────────────────────────────────────────────

    def peek(self) -> Wait[str]:
        """Return the next character, "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def sees(self, literal: str) -> Wait[bool]:
        """Return whether the text continues with `literal`."""
        while True:
            ahead = self._text[self._at : self._at + len(literal)]
            if ahead == literal:
                return True
            if self.ended or not literal.startswith(ahead):
                return False
            yield

    # ── moving on ───────────────────────────────────────────────────────────────────────────

    def skip(self, count: int) -> str:
        """Skip and return `count` characters."""
        begin, self._at = self._at, self._at + count
        return self._text[begin : self._at]

    def accept(self, literal: str) -> Wait[bool]:
        """Skip `literal` if the text continues with it; return whether it did."""
        if (yield from self.sees(literal)):
            self._at += len(literal)
            return True
        return False

    def run(self, pattern: re.Pattern[str], write: Callable[[str], object]) -> Wait[None]:
        """Write the longest run that matches `pattern`, as it arrives."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            write(match[0])
            if self.ended or self._at < len(self._text):
                return
            yield

    def skip_space(self) -> Wait[None]:
        """Skip white space."""
        yield from self.run(SPACE, len)

    def until(self, markers: tuple[str, ...], write: Callable[[str], object]) -> Wait[str]:
        """Write the text before the first of `markers`; skip and return that one, "" at the end."""
        while True:
            match = first_of(markers).search(self._text, self._at) if markers else None
            if match is not None:
                write(self.skip(match.start() - self._at))
                self._at = match.end()
                return match[0]
            rest = len(self._text) - self._at
            keep = 0 if self.ended else length_of_beginning(self._text[self._at :], markers)
            write(self.skip(rest - keep))
            if self.ended:
                return ""
            yield

    # ── JSON ────────────────────────────────────────────────────────────────────────────────

    def string(self, write: Callable[[str], object]) -> Wait[bool]:
        """Write one JSON string unchanged, with quotes and escapes; False if it is cut off."""
        write(self.skip(1))
        while True:
            yield from self.run(PLAIN, write)
            stopper = yield from self.peek()
            if stopper != "\\":
                write(self.skip(len(stopper)))
                return stopper == '"'
            while len(self._text) - self._at < 2 and not self.ended:
                yield
            write(self.skip(2))

    def decoded_string(self) -> Wait[str | None]:
        """Return the value of a JSON string, None if there is none."""
        if (yield from self.peek()) != '"':
            return None
        raw: list[str] = []
        if not (yield from self.string(raw.append)):
            return None
        return decoded("".join(raw))

    def value(self, write: Callable[[str], object]) -> Wait[bool]:
        """Write one JSON value unchanged; False if it is cut off or cannot be JSON.

        Only strings and brackets are looked at: {"a": 1,} passes, {"a": 1] does not.
        """
        closers: list[str] = []
        while True:
            char = yield from self.peek()
            if char in CLOSES:
                closers.append(CLOSES[char])
                write(self.skip(1))
            elif char == '"':
                if not (yield from self.string(write)):
                    return False
            elif closers and char == closers[-1]:
                closers.pop()
                write(self.skip(1))
            elif char and IN_SCALAR.match(char):
                yield from self.run(SCALAR, write)
            else:
                return False
            if not closers:
                return True
            yield from self.run(BETWEEN, write)

    # ── making parts ────────────────────────────────────────────────────────────────────────

    def content(self, text: str) -> None:
        """Add text for the user. Trailing space waits for more text; a call drops it."""
        if self._only_calls:
            return
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._parts.append(ContentPart(shown))

    def hold(self, back: str = "") -> None:
        """Hold the text from here on (including `back`): it may be a call, or content."""
        self._held_from = self._at - len(back)

    def show(self) -> None:
        """Release the held text as content."""
        if self._held_from is not None:
            held, self._held_from = self._text[self._held_from : self._at], None
            self.content(held)

    def drop(self) -> None:
        """Discard the held text."""
        self._held_from = None

    def reason(self, text: str) -> None:
        """Add reasoning; space at its end is dropped."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._parts.append(Reasoning(shown))

    def end_reasoning(self) -> None:
        """End the reasoning."""
        self._space = ""

    def begin_call(self, name: str) -> Callable[[str], None]:
        """Begin a call with the held text; return the function that writes its arguments."""
        self._held_from = None
        self._space = ""
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._open = True
        self._parts.append(CallBegins(index, name, self._new_id()))

        def write(text: str) -> None:
            if text:
                self._parts.append(CallArguments(index, text))

        return write

    def end_call(self, complete: bool = True) -> None:
        """End the arguments of the open call."""
        if self._open:
            self._open = False
            self._parts.append(CallEnds(self.num_calls - 1, complete))

    def finish(self) -> None:
        """End the text: an open call is incomplete, and held space is content."""
        self.show()
        self.end_call(complete=False)
        if self._space and not self.num_calls:
            self._parts.append(ContentPart(self._space))
            self._space = ""


@cache
def first_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the first of some texts; a search for each would take quadratic time."""
    return re.compile("|".join(map(re.escape, sorted(markers))))


def joined(parts: list[Part]) -> list[Part]:
    """Join neighbours of one kind: two pieces of the same call's arguments become one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, ContentPart) and isinstance(last, ContentPart):
            result[-1] = ContentPart(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        elif (
            isinstance(part, CallArguments)
            and isinstance(last, CallArguments)
            and part.index == last.index
        ):
            result[-1] = CallArguments(part.index, last.text + part.text)
        else:
            result.append(part)
    return result


def length_of_beginning(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that begins a marker: "see <to" → 3."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


def decoded(raw: str) -> str | None:
    """Return the value of a quoted JSON string, raw line breaks allowed; None if it is invalid."""
    try:
        value = json.loads(raw, strict=False)
        assert isinstance(value, str)
        value.encode()  # half a character, "\\ud83d", is no text
    except ValueError:
        return None
    return value
