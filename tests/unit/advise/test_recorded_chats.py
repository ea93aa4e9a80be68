"""What recorded chats could do without, counted offline: runs, tools, documents, examples, ends."""

import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.advise.recorded_chats import (
    MAX_BLOCK_CHARACTERS,
    MIN_OFFERS,
    MIN_QUESTIONS,
    RUN,
    ChatReport,
    SuperfluousPart,
    examples_of,
    looped_pieces,
    read_chats,
    repeated_pieces,
    report_on,
    show_report,
    telling_words,
)
from headway.core.errors import UsageError

MOODS = """Say the mood.

Text: I love it.
Mood: good

Text: It broke.
Mood: bad

Text: Fine, I guess.
Mood:"""
SECRET = "Xylophones"
TOOL = {"type": "function", "function": {"name": "paint_fence", "parameters": {"type": "object"}}}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def document(text: str) -> dict[str, Any]:
    return {"type": "document", "document": {"data": text}}


@pytest.fixture
def report_of(tmp_path: Path) -> Any:
    """Return the report on lines of a file."""

    def make(lines: list[dict[str, Any]]) -> ChatReport:
        path = tmp_path / "chats.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
        return report_on(read_chats(path))

    return make


def part(report: ChatReport, word: str) -> SuperfluousPart:
    [result] = [each for each in report.parts if word in each.what]
    return result


# ── one prompt, one answer ──────────────────────────────────────────────────────────────────────


def test_runs_that_stand_before_in_the_prompt_are_counted_once_and_without_overlap():
    words, shared = [str(i) for i in range(100)], [str(i) for i in range(40, 60)]
    assert repeated_pieces(words) == 0
    assert repeated_pieces(words + shared) == 20
    assert repeated_pieces(words + shared + shared) == 40
    assert repeated_pieces(words + words[: RUN - 1]) == 0
    assert repeated_pieces(words + words[:RUN]) == RUN
    assert repeated_pieces(["1"] * (2 * RUN - 1)) == 0 < repeated_pieces(["1"] * 2 * RUN)


@pytest.mark.parametrize("period", [1, 3, 32])
def test_an_end_that_repeats_is_counted_without_its_first_time(period: int):
    head, piece = ["x"] * 7, [f"p{i}" for i in range(period)]
    answer = head + piece * 40
    assert looped_pieces(answer) == len(answer) - len(head) - period
    assert looped_pieces([*answer, "end"]) == looped_pieces(head) == looped_pieces([]) == 0


def test_words_tell_of_a_document_where_no_other_text_has_them():
    documents = ["Anna has a red kite.", "Tom has a blue ball.", "Eve has a bell."]
    anna, tom, _ = telling_words(documents, ["What colour is the kite of Anna?"])
    assert anna == {"red"} and tom == {"tom", "blue", "ball"}


@pytest.mark.parametrize(
    ("messages", "count", "question"),
    [
        ([user("1 + 1"), assistant("2"), user("2 + 2"), assistant("4"), user("3")], 2, "3"),
        ([user(MOODS)], 2, MOODS),
        ([{"role": "system", "content": MOODS}, user("Hm?")], 2, "Hm?"),
    ],
)
def test_examples_are_pairs_or_blocks_of_one_shape(messages, count, question):
    texts, last_question = examples_of(messages)
    assert (len(texts), last_question) == (count, question)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("Hello")],
        [user("a"), user("b"), user("c")],
        [user("a"), {"role": "tool", "content": "b"}, user("c")],
        [user("Note: one thing.\n\nNote: another.")],
        [user("Text: a\nMood: b")],
        [user("Text: a\nMood: b\n\nBetween them.\n\nText: c\nMood: d")],
        [user(MOODS + "x" * MAX_BLOCK_CHARACTERS)],
    ],
)
def test_other_chats_have_no_examples(messages):
    assert examples_of(messages) is None


# ── all of them ─────────────────────────────────────────────────────────────────────────────────


def test_a_tool_that_was_offered_often_and_never_called_is_named(report_of):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find"}}]}
    lines = [{"messages": [user("Hi")], "tools": [TOOL, FIND]} for _ in range(MIN_OFFERS)]
    lines[3]["messages"] += [call, {"role": "tool", "content": "none"}]
    result = part(report_of(lines), "tool ")
    assert result.what == "tool paint_fence, never called" and result.chats == MIN_OFFERS
    assert 0 < result.words < result.of_words
    assert not [p for p in report_of(lines[1:]).parts if "tool" in p.what], "offered too seldom"
    response = {"choices": [{"message": {"tool_calls": [{"function": {"name": "paint_fence"}}]}}]}
    lines[5] = {"body": lines[5], "response": {"body": response}}
    assert not [p for p in report_of(lines).parts if "tool" in p.what]


def test_documents_that_the_answer_has_no_word_of(report_of):
    story = "Once a brave little frog lived by the sea"
    lines = [
        {
            "messages": [
                user([document(f"The road has {i}."), document(story), {"text": "Road?"}])
            ],
            "answer": f"It has {i}.",
        }
        for i in range(10, 14)
    ]
    lines.append({"messages": lines[0]["messages"]})  # no answer: nothing is known of it
    lines.append({"messages": [user("Hm?")], "documents": [{"text": "Rivers"}], "answer": "Rivers"})
    result = part(report_of(lines), "documents")
    assert result.chats == 5 and result.words == 4 * len(story.split())
    assert "5 of 5, 0 of 4" in result.note


def test_examples_count_where_several_questions_share_them(report_of):
    pairs = [user("1 + 1"), assistant("2")]
    lines = [{"messages": [*pairs, user(f"{i} + 1")]} for i in range(MIN_QUESTIONS)]
    result = part(report_of(lines), "examples")
    assert result.chats == MIN_QUESTIONS and result.words == 4 * MIN_QUESTIONS
    same = [{"messages": [*pairs, user("again")]} for _ in range(20)]
    assert not [p for p in report_of(same).parts if "examples" in p.what], "one question"


def test_long_and_repeating_answers(report_of):
    lines = [{"messages": [user("Hi")], "answer": "so it is"} for _ in range(9)]
    lines.append({"messages": [user("Hi")], "answer": "again and " * 50})
    report = report_of(lines)
    above, looped = part(report, "answers behind"), part(report, "repeat")
    assert above.chats == looped.chats == 1 and above.of_words == 9 * 3 + 100
    assert looped.words == 98 and 80 < above.words < 100


def test_the_report_has_no_text_of_the_chats(report_of):
    lines = [
        {
            "messages": [user([document(SECRET), {"text": f"{SECRET} {i}? " * 40}])],
            "tools": [TOOL],
            "answer": f"{SECRET} " * 50,
        }
        for i in range(12)
    ]
    report, written = report_of(lines), StringIO()
    show_report(report, Console(width=160, file=written))
    shown = written.getvalue()
    assert report.parts and "never called" in shown and "repeated in one prompt" in shown
    assert SECRET not in shown and SECRET not in repr(report)


# ── the file ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no chat"),
        ("{", "line 1"),
        ('{"messages": [{"role": "user"}]}\n[1]', "line 2"),
        ('{"messages": "Hi"}', "line 1 has no messages"),
        ('{"body": {"messages": [1]}}', "has no messages"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_other_files_are_named(tmp_path: Path, text: str, words: str):
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_chats(path)
    assert words in caught.value.cause


def test_a_fifo_and_a_missing_file_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nowhere"):
        with pytest.raises(UsageError, match="--data"):
            read_chats(tmp_path / name)


def test_fields_of_other_types_are_passed_over(report_of):
    odd = {"role": 3, "content": {"x": 1}, "tool_calls": [7, {"function": 1}]}
    line = {"messages": [odd, user(None)], "tools": [5, {}], "documents": [1, {"data": 2}]}
    assert report_of([line | {"answer": 5, "response": {"choices": []}}]).parts == []
