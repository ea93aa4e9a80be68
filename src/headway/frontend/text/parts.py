"""What an answer is made of: content, reasoning and tool calls, as parts that arrive in order.

A model writes one text; an `OutputParser` tells its parts apart while they arrive. `Output` is what
they add up to. Worked example, a call of get_weather after a word of explanation:

    Content("Let me see.")
    CallBegins(0, "get_weather", "call_9kQ…")
    CallArguments(0, '{"city": ')
    CallArguments(0, '"Rome"}')
    CallEnds(0)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool call, the answer's `index`-th; its arguments follow."""

    index: int
    name: str
    call_id: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which are JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """A call is over; not `complete` when the answer ended within its arguments."""

    index: int
    complete: bool = True


Part = Content | Reasoning | CallBegins | CallArguments | CallEnds


@dataclass(slots=True)
class Call:
    """One tool call."""

    name: str
    call_id: str
    pieces: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def arguments(self) -> str:
        """JSON text as the model wrote it, right or wrong."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Output:
    """All parts of an answer so far, put together."""

    contents: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The text for the user."""
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        """What the model wrote to itself."""
        return "".join(self.thoughts)

    def accumulate(self, parts: Iterable[Part]) -> None:
        """Add what came next."""
        for part in parts:
            match part:
                case Content(text):
                    self.contents.append(text)
                case Reasoning(text):
                    self.thoughts.append(text)
                case CallBegins(_, name, call_id):
                    self.calls.append(Call(name, call_id))
                case CallArguments(index, text):
                    self.calls[index].pieces.append(text)
                case CallEnds(index, complete):
                    self.calls[index].complete = complete
