"""Recorded chats asked with fewer of their examples: the same chats in every column."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.core.errors import UsageError
from headway.evals.fewer import ask, counts, read, table, with_examples


def body(number: int, examples: int = 6) -> dict[str, Any]:
    pairs = [
        {"role": role, "content": f"{role} {i}"}
        for i in range(examples)
        for role in ("user", "assistant")
    ]
    return {"messages": [*pairs, {"role": "user", "content": f"question {number}"}]}


class Model:
    """Answers all questions alike from two examples on, a tenth of them differently below."""

    def __init__(self, needs: int = 2, always: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self._needs, self._always = needs, always

    def whole_answers(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.asked += bodies
        return [self.answer(each) for each in bodies]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body["messages"]
        examples, question = (len(messages) - 1) // 2, messages[-1]["content"]
        odd = self._always or question.endswith("0")
        text = f"no  {examples}" if examples < self._needs and odd else f"yes to {question}"
        message = {"role": "assistant", "content": text}
        return {"choices": [{"message": message}], "usage": {"prompt_tokens": 10 * len(messages)}}


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    return path


def test_the_fewest_examples_that_change_hardly_an_answer(tmp_path):
    lines = [{**body(i), "answer": f"yes to question {i}"} for i in range(20)]
    chats = read(written(tmp_path / "a.jsonl", [*lines, {"body": body(0, examples=0)}]))
    model = Model()
    report = ask(model, chats, most_chats=50, seed=1)
    assert (report.chats, report.with_examples, report.most, report.again) == (21, 20, 6, 1.0)
    assert [c.examples for c in report.columns] == [6, 4, 2, 1, 0] == counts(6)
    assert [sum(c.same) for c in report.columns] == [20, 20, 20, 18, 18]
    assert [c.share_right for c in report.columns] == [1, 1, 1, 0.9, 0.9]
    assert [c.mean_tokens for c in report.columns] == [130, 90, 50, 30, 10]
    assert report.enough.examples == 2
    report.price(None)
    assert "| – | – |" in table(report)
    cost = {"usd_per_million_input": 2.0}
    report.price({"prompts": {"token_s": 0.001}, "windows": [{}, {"cost": cost}]})
    told = table(report)
    assert "| 2 | 50 | 62% | 100% (84 to 100) | 100% | 80.0 ms | 0.16 |" in told
    assert "With 2 of 6 examples 100% of the answers are right, and 100% with all." in told
    first = [body["messages"] for body in model.asked[:20]]
    last = [body["messages"] for body in model.asked[-20:]]
    assert [m[-1] for m in first] == [m[-1] for m in last], "columns are paired"


def test_without_right_answers_those_that_stay_are_counted(tmp_path):
    chats = read(written(tmp_path / "a.jsonl", [body(i) for i in range(20)]))
    report = ask(Model(), chats, most_chats=50, seed=1)
    assert report.enough.examples == 2
    assert "Examples beyond 2 of 6 change 0 of 20 answers." in table(report)


def test_where_all_help_none_is_called_superfluous(tmp_path):
    chats = read(written(tmp_path / "a.jsonl", [body(i) for i in range(9)]))
    report = ask(Model(needs=6, always=True), chats, most_chats=5, seed=1)
    assert report.enough is report.columns[0] and len(report.columns[0].same) == 5
    assert report.columns[0].share_right is None
    assert "With fewer than 6 examples" in table(report)


def test_a_conversation_is_not_asked(tmp_path):
    turns = [body(0, examples=k) for k in range(1, 8)] * 3
    chats = read(written(tmp_path / "a.jsonl", turns))
    assert with_examples(chats) == []
    with pytest.raises(UsageError, match="None of 21 chats"):
        ask(Model(), chats, most_chats=5, seed=1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2"),
        (b'{"prompt": "a"}', "line 2 has no messages"),
        (b'{"messages": [1]}', "no"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(msgspec.json.encode(body(1)) + b"\n" + line)
    with pytest.raises(UsageError, match=said):
        read(path)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "holds no chat"), (b"\n \n", "no chat"), (b"\xff\xfe", "not UTF-8")]
)
def test_files_without_a_chat_are_refused(tmp_path, content, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read(path)


def test_a_line_ends_with_a_newline_alone(tmp_path):
    """JSON may hold separators that other text breaks lines at."""
    chat = {"messages": [{"role": "user", "content": "a\u2028b\x85c"}]}
    [found] = read(written(tmp_path / "a.jsonl", [chat]))
    assert found.body == chat


def test_what_is_about_sampling_is_not_asked_again(tmp_path):
    line = {"body": {**body(1), "temperature": 2, "stream": True, "tools": [], "max_tokens": 3}}
    [chat] = read(written(tmp_path / "a.jsonl", [line]))
    assert chat.body == {**body(1), "tools": [], "max_tokens": 3}
