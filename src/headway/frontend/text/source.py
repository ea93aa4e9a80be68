"""Text that is still arriving, for parsers written as if all of it were there.

A parser is a generator: where it wants text that has not come it yields, and it is resumed when
more has. It decides only by what it has seen, never by where the text was cut, so any split of a
text gives the same parts; what cannot be decided yet is held back. Worked example, a parser that
looks for "<tool_call>":

    feed "Hello <to"     Content("Hello")      "<to" may begin a call, the space may stand before it
    feed "day>"          Content(" <today>")   it did not
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
    Content,
    Part,
    Reasoning,
)

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A piece of a parser: it yields while it waits for text, and returns a T."""

SPACE = re.compile(r"\s*")
PLAIN = re.compile(r'[^"\\]*')
BETWEEN = re.compile(r"[\s,:]*")
IN_SCALAR = re.compile(r"[-+.\w]")
SCALAR = re.compile(r"[-+.\w]*")
CLOSES = {"{": "}", "[": "]"}


class Source:
    """The text and a place in it, and the parts that were made of it."""

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
        """Tool → the schema of its arguments, for formats that write texts without quotes."""
        self._only_calls = only_calls
        """A grammar forces calls: what is none yet is the beginning of one, never content."""
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
        """More text has come; after the `last` there is none."""
        begin = self._at if self._held_from is None else self._held_from
        self._text = self._text[begin:] + text
        self._at -= begin
        self._held_from = None if self._held_from is None else 0
        self.ended = last

    def take(self) -> list[Part]:
        """The parts made since the last time, neighbours of one kind joined."""
        parts, self._parts = self._parts, []
        return joined(parts)

    # ── looking ─────────────────────────────────────────────────────────────────────────────

    def peek(self) -> Wait[str]:
        """The next character, "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def sees(self, literal: str) -> Wait[bool]:
        """Whether the text goes on with `literal`."""
        while True:
            seen = self._text[self._at : self._at + len(literal)]
            if seen == literal:
                return True
            if self.ended or not literal.startswith(seen):
                return False
            yield

    # ── moving on ───────────────────────────────────────────────────────────────────────────

    def skip(self, count: int) -> str:
        """Step over characters that were seen."""
        begin, self._at = self._at, self._at + count
        return self._text[begin : self._at]

    def accept(self, literal: str) -> Wait[bool]:
        """Step over `literal` if the text goes on with it."""
        if (yield from self.sees(literal)):
            self._at += len(literal)
            return True
        return False

    def run(self, pattern: re.Pattern[str], write: Callable[[str], object]) -> Wait[None]:
        """Write the longest run of characters that `pattern` allows, as it comes."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            write(match[0])
            if self.ended or self._at < len(self._text):
                return
            yield

    def skip_space(self) -> Wait[None]:
        """Step over white space."""
        yield from self.run(SPACE, len)

    def until(self, markers: tuple[str, ...], write: Callable[[str], object]) -> Wait[str]:
        """Write what comes before the first of `markers` and step over that; "" at the end."""
        while True:
            found = first_of(markers).search(self._text, self._at) if markers else None
            if found is not None:
                write(self.skip(found.start() - self._at))
                self._at = found.end()
                return found[0]
            rest = len(self._text) - self._at
            keep = 0 if self.ended else length_of_beginning(self._text[self._at :], markers)
            write(self.skip(rest - keep))
            if self.ended:
                return ""
            yield

    # ── JSON ────────────────────────────────────────────────────────────────────────────────

    def string(self, write: Callable[[str], object]) -> Wait[bool]:
        """Write one JSON string as it stands, quotes and escapes too; False when it is cut off."""
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
        """What a JSON string says; None where there is none."""
        if (yield from self.peek()) != '"':
            return None
        raw: list[str] = []
        if not (yield from self.string(raw.append)):
            return None
        return decoded("".join(raw))

    def value(self, write: Callable[[str], object]) -> Wait[bool]:
        """Write one JSON value as it stands; False where it breaks off or cannot be JSON.

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
        """Text for the user. Space waits for what follows it: beside a call it is dropped."""
        if self._only_calls:
            return
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._parts.append(Content(shown))

    def hold(self, back: str = "") -> None:
        """From here on, after `back`, this may be a call or may turn out to be text."""
        self._held_from = self._at - len(back)

    def show(self) -> None:
        """What was held is text."""
        if self._held_from is not None:
            held, self._held_from = self._text[self._held_from : self._at], None
            self.content(held)

    def drop(self) -> None:
        """What was held belongs to nothing."""
        self._held_from = None

    def reason(self, text: str) -> None:
        """Text that the model writes to itself; space at its end is dropped."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._parts.append(Reasoning(shown))

    def end_reasoning(self) -> None:
        """What follows is for the user."""
        self._space = ""

    def begin_call(self, name: str) -> Callable[[str], None]:
        """What was held is a call; returns what takes its arguments."""
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
        """The arguments are over."""
        if self._open:
            self._open = False
            self._parts.append(CallEnds(self.num_calls - 1, complete))

    def finish(self) -> None:
        """Nothing follows: a call that is open broke off, held space ends the text."""
        self.show()
        self.end_call(complete=False)
        if self._space and not self.num_calls:
            self._parts.append(Content(self._space))
            self._space = ""


@cache
def first_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """What finds the first of some texts; looking for each to the end would take the square."""
    return re.compile("|".join(map(re.escape, sorted(markers))))


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind as one: two pieces of the same call's arguments are one piece."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + part.text)
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
    """Length of the longest end of `text` that begins a marker: "see <to" → 3."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


def decoded(raw: str) -> str | None:
    """What a JSON string with its quotes says, raw line breaks allowed; None if it is not one."""
    try:
        value = json.loads(raw, strict=False)
        assert isinstance(value, str)
        value.encode()  # half a character, "\\ud83d", is no text
    except ValueError:
        return None
    return value
