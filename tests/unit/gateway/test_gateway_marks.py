"""Marks are taken as they come and read later: none is lost, and a bad one is refused at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.edge.relayed import mark
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.marks import TokenMarks

TOKENS = st.lists(st.integers(0, 300_000), max_size=4)


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=30))
def test_all_tokens_are_told_whenever_it_is_asked(lines: list[tuple[list[int], bool]]) -> None:
    marks, shown = TokenMarks(), list[int]()
    for number, (tokens, asked) in enumerate(lines):
        assert marks.take(mark(40 + number, number, tokens).rstrip(b"\n")) == len(tokens)
        shown += tokens
        if asked:
            assert marks.usage() == UpstreamUsage(40 + number, number, len(shown))
    assert marks.has_marks == bool(lines)
    assert marks.tokens() == shown
    assert marks.usage().output == len(shown)


def test_another_comment_is_no_mark() -> None:
    marks = TokenMarks()
    assert marks.take(b": ping") is None
    assert not marks.has_marks and marks.usage() == UpstreamUsage()


@pytest.mark.parametrize(
    "line",
    [
        *[b": headway 40 16", b": headway 40 16 1 2", b": headway 40 16 1,", b": headway 40 x 1"],
        *[b": headway -1 0 1", b": headway " + b"9" * 5000 + b" 0 1"],
    ],
)
def test_a_bad_mark_is_refused_when_it_comes(line: bytes) -> None:
    marks = TokenMarks()
    with pytest.raises(ValueError, match="a mark has three parts"):
        marks.take(line)
    assert not marks.has_marks
