"""Incremental parser of an answer: reasoning, tool calls and content.

An `OutputParserSpec` states how a model writes reasoning and tool calls and which are expected;
each sequence of the answer gets an `OutputParser`. The parts do not depend on where the text was
cut, and all text that is neither reasoning nor a call is content.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.frontend.text.parts import CallEnds, Part
from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools import ToolFormat, new_call_id


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers around reasoning."""

    open: str
    close: str


REASONING_MARKERS = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<|channel>thought", "<channel|>"),
)


def choose_reasoning_markers(template: str | None) -> ReasoningMarkers | None:
    """Return the reasoning markers in a chat template, None if there are none."""
    for markers in REASONING_MARKERS:
        if template is not None and markers.close in template:
            return markers
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserSpec:
    """Parts to expect in the answers of one request.

    `thinking`: the prompt ends inside reasoning. `offered`: names of the tools. `single`: the
    answer ends with its first call. `forced`: after the reasoning there are only calls. `schemas`:
    tool → schema of its arguments.
    """

    format: ToolFormat | None = None
    reasoning: ReasoningMarkers | None = None
    thinking: bool = False
    offered: frozenset[str] = frozenset()
    single: bool = False
    forced: bool = False
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def markers(self) -> tuple[str, ...]:
        """Return texts that the parser needs even if they are special tokens."""
        calls = self.format.markers if self.format else ()
        return (*calls, self.reasoning.open, self.reasoning.close) if self.reasoning else calls


class OutputParser:
    """Parser of the text of one sequence."""

    def __init__(self, spec: OutputParserSpec) -> None:
        new_id = spec.format.new_id if spec.format else new_call_id
        self._source = TextSource(
            new_id, spec.offered, only_calls=spec.forced, schemas=spec.schemas
        )
        self._single = spec.single
        self._parser = whole_answer(spec, self._source)
        self.done = False
        """Whether further text is ignored."""
        next(self._parser)

    @property
    def num_calls(self) -> int:
        """Return the number of calls that have begun."""
        return self._source.num_calls

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Return the parts that are certain after `text`; with `last` also all held text."""
        if self.done or not (text or last):
            return []
        self._source.feed(text, last)
        next(self._parser, None)
        if last:
            self._source.finish()
        parts = self._source.take()
        if self._single:
            parts = self._up_to_first_call(parts)
        self.done = self.done or last
        return parts

    def _up_to_first_call(self, parts: list[Part]) -> list[Part]:
        for number, part in enumerate(parts, 1):
            if isinstance(part, CallEnds):
                self.done = True
                return parts[:number]
        return parts


def whole_answer(spec: OutputParserSpec, source: TextSource) -> Wait[None]:
    """Parse reasoning first, if any; then calls and content."""
    if spec.reasoning is not None:
        yield from reasoning(source, spec.reasoning, spec.thinking)
    if spec.format is not None:
        yield from spec.format.parse(source)
    else:
        yield from source.until((), source.content)


def reasoning(source: TextSource, markers: ReasoningMarkers, thinking: bool) -> Wait[None]:
    """Parse the reasoning between its markers at the beginning of an answer."""
    if not thinking:
        source.hold()
        yield from source.skip_space()
        if not (yield from source.accept(markers.open)):
            source.show()
            return
        source.drop()
    yield from source.skip_space()
    yield from source.until((markers.close,), source.reason)
    source.end_reasoning()
    yield from source.skip_space()
