"""Parts of an answer: content, reasoning and tool calls, in order of arrival.

A model writes one text; an `OutputParser` splits it into parts while it arrives. `ParsedOutput` is
their sum. Example, a call of get_weather after a word of explanation:

    ContentPart("Let me see.")
    CallBegins(0, "get_weather", "call_9kQ…")
    CallArguments(0, '{"city": ')
    CallArguments(0, '"Rome"}')
    CallEnds(0)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text of the model."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Begin of tool call number `index` of the answer; its arguments follow."""

    index: int
    name: str
    call_id: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Piece of the arguments of a call, which are JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """End of a call; not `complete` if the answer ended within its arguments."""

    index: int
    complete: bool = True


Part = ContentPart | Reasoning | CallBegins | CallArguments | CallEnds


@dataclass(slots=True)
class ParsedCall:
    """One tool call."""

    name: str
    call_id: str
    pieces: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def arguments(self) -> str:
        """Return the JSON text as the model wrote it, valid or not."""
        return "".join(self.pieces)


@dataclass(slots=True)
class ParsedOutput:
    """Accumulated parts of an answer."""

    contents: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)

    @property
    def content(self) -> str:
        """Return the text for the user."""
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        """Return the reasoning text."""
        return "".join(self.thoughts)

    def accumulate(self, parts: Iterable[Part]) -> None:
        """Add the next parts."""
        for part in parts:
            match part:
                case ContentPart(text):
                    self.contents.append(text)
                case Reasoning(text):
                    self.thoughts.append(text)
                case CallBegins(_, name, call_id):
                    self.calls.append(ParsedCall(name, call_id))
                case CallArguments(index, text):
                    self.calls[index].pieces.append(text)
                case CallEnds(index, complete):
                    self.calls[index].complete = complete
