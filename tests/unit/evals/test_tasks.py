"""Standard tasks: how questions are read, what is right, which tasks are asked."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.core.errors import UsageError
from headway.core.scoring import Score
from headway.evals import suites
from headway.evals.tasks import choices, gsm8k, humaneval, ifeval
from headway.evals.tasks.table import named_tasks, tasks_at_hand
from headway.evals.tasks.task import EvalTask, MultipleChoice, TaskQuestion, ask, feasible_tasks


class Scripted:
    """A model that answers by a table, and likes texts better that hold its favourite word."""

    name = "scripted"

    def __init__(self, answers: dict[str, str], favourite: str = "") -> None:
        self.answers, self.favourite = answers, favourite

    def generate(self, chats: Any, *, max_tokens: int) -> list[str | None]:
        return [self.answers.get(chat[-1]["content"], "no idea") for chat in chats]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def score(self, texts: Sequence[str], *, top: int = 0) -> list[Score]:
        found = []
        for text in texts:
            ids = self.encode(text)
            each = -0.1 if self.favourite and text.endswith(self.favourite) else -2.0
            logprobs = [None, *([each] * (len(ids) - 1))]
            found.append(Score(token_ids=ids, logprobs=logprobs, top=[{}] * len(ids)))
        return found


def rows(path: Path, *content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, content)))
    return path


def test_word_problems_are_right_by_their_last_number(tmp_path: Path):
    shots = {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}
    rows(tmp_path / gsm8k.SHOTS_FILE, *[shots] * 6)
    rows(tmp_path / gsm8k.FILE, {"question": "How many?", "answer": "It is 1,007.\n#### 1,007"})
    task = gsm8k.read(tmp_path, 10)
    (one,) = task.questions
    assert [m["role"] for m in one.messages] == ["user", "assistant"] * 4 + ["user"]
    assert one.messages[1]["content"] == "2+2=4\n#### 4", "without the calculator's notes"
    for reply, right in (
        ("So 1000 + 7 = 1007.", True),
        ("#### 1,007", True),
        ("#### 1007\nBut 3 is nicer", False),
        ("$1007.00", True),
        ("10 07", False),
        ("", False),
    ):
        assert one.accepts(reply) is right, reply


def test_last_words_are_chosen_among_those_of_the_next_passages():
    words = ("tree", "tree", "Tree", "cat", "hat", "car")
    found = choices.last_words([f"they went to see the {word}" for word in words])
    assert found[0] == MultipleChoice("they went to see the", [" tree", " cat", " hat", " car"], 0)
    assert found[4].choices == [" hat", " car", " tree", " cat"], "the last go on with the first"
    task = EvalTask("lambada-choices", (), found)
    right = [item.right for item in ask(Scripted({}, "cat"), [task]).items]
    assert right == [False, False, False, True, False, False]


def test_a_file_of_ones_own(tmp_path: Path):
    own = rows(
        tmp_path / "mine.jsonl",
        {"question": "Capital of France?", "answer": "Paris"},
        {"messages": [{"role": "user", "content": "Say it"}], "answer": "good morning"},
        {"context": "The sky is", "choices": ["green", "blue"], "answer": 1},
        {"question": "A whale is a", "choices": ["fish", "mammal"], "answer": "mammal"},
    )
    (task,) = named_tasks([str(own)], "", 10, False)
    assert task.name == "mine" and len(task) == 4
    assert task.choices[0] == MultipleChoice("The sky is", [" green", " blue"], 1)
    model = Scripted({"Capital of France?": "It is Paris.", "Say it": "Good  morning!"}, "blue")
    found = ask(model, [task])
    assert [item.right for item in found.items] == [True, True, True, False]
    assert not task.questions[0].accepts("Parisians")
    share = found.find("mine", 1)
    assert share is not None and (share.right, share.total) == (3, 4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 1"),
        ('{"question": "?"}', "KeyError"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "two choices"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "IndexError"),
        ('{"context": "a", "choices": ["b", "c"], "answer": "d"}', "ValueError"),
        ('{"question": "a", "answer": "?"}', "the answer is empty"),
        ("", "has no questions"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_by_line(tmp_path: Path, line: str, said: str):
    (tmp_path / "mine.jsonl").write_text(line)
    with pytest.raises(UsageError, match=said):
        named_tasks([str(tmp_path / "mine.jsonl")], "", 10, False)


def test_a_task_that_is_not_known_or_not_at_hand_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for words, said in (
        (("--tasks=mmlu",), "there is no task and no file 'mmlu'"),
        (("--tasks=gsm8k",), f"--tasks gsm8k reads {gsm8k.FILE}"),
        (("--tasks=gsm8k", f"--data={tmp_path}", "--suite=tasks"), gsm8k.FILE),
        (("--suite=tasks",), "has no task at hand"),
    ):
        assert main(["eval", "headway-tiny", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "given", "right", "wrong"),
    [
        ("keywords:existence", {"keywords": ["sea", "ship"]}, "A Ship at sea", "a ship"),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "the Cat"),
        (
            "keywords:frequency",
            {"keyword": "story", "frequency": 2, "relation": "at least"},
            *("Story, story", "story"),
        ),
        (
            "keywords:letter_frequency",
            {"letter": "z", "let_frequency": 2, "let_relation": "less than"},
            *("Zoo", "pizza"),
        ),
        (
            "length_constraints:number_words",
            {"num_words": 3, "relation": "at least"},
            *("one two three", "one two"),
        ),
        (
            "length_constraints:number_sentences",
            {"num_sentences": 3, "relation": "less than"},
            *("It costs 3.50. Fine!", "One. Two? Three!"),
        ),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
            *('a b\n\n"Weekend!" he said', "weekend\n\nb"),
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP. S. y", "x\nPS y"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
        ("detectable_format:constrained_response", {}, "So: My answer is no.", "no"),
        (
            "detectable_format:number_highlighted_sections",
            {"num_highlights": 2},
            *("*a* and *b*", "*a* and * *"),
        ),
        (
            "detectable_format:multiple_sections",
            {"num_sections": 2, "section_spliter": "PART"},
            *("PART 1 a PART 2 b", "PART 1 a"),
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ("detectable_format:title", {}, "<<A day>> it was", "<< >>"),
        ("combination:two_responses", {}, "a ****** b", "a ****** a"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes", "Yes"),
        ("startend:end_checker", {"end_phrase": "The end."}, 'so "the end."', "the end. Or not"),
        ("startend:quotation", {}, ' "a" ', '"a'),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "less than"},
            *("AN end", "AN END"),
        ),
        ("change_case:english_capital", {}, "ALL 3.", "All"),
        ("change_case:english_lowercase", {}, "all 3.", "All"),
        ("punctuation:no_comma", {}, "a; b", "a, b"),
    ],
)
def test_instructions_are_checked(name: str, given: dict[str, Any], right: str, wrong: str):
    row = {"prompt": "Do it.", "instruction_id_list": [name], "kwargs": [{**given, "odd": None}]}
    one = ifeval.question(row)
    assert one.accepts(right) and not one.accepts(wrong) and not one.accepts(" ")


def test_all_instructions_of_a_prompt_must_be_kept(tmp_path: Path):
    both = {
        "prompt": "Quote without commas.",
        "instruction_id_list": ["startend:quotation", "punctuation:no_comma"],
        "kwargs": [{}, {}],
    }
    language = {
        "prompt": "In Hindi.",
        "instruction_id_list": ["language:response_language"],
        "kwargs": [{"language": "hi"}],
    }
    rows(tmp_path / ifeval.FILE, both, language)
    (one,) = ifeval.read(tmp_path, 10).questions
    assert one.accepts('"a b"') and not one.accepts('"a, b"') and not one.accepts("a b")
    assert set(ifeval.CHECKS) & {"language:response_language"} == set()


ADD = {
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(f):\n    assert f(2, 3) == 5\n",
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A data folder with one function to complete."""
    path = tmp_path / humaneval.FILE
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(ADD) + "\n")
    return tmp_path


def test_programs_run_only_where_asked(programs: Path, capsys: pytest.CaptureFixture[str]):
    """Named without --run-code the reference solution is a text, required as any."""
    assert named_tasks(["humaneval"], str(programs), 5, False) == []
    assert [len(task) for task in named_tasks(["humaneval"], str(programs), 5, True)] == [1]
    assert [task.name for task in tasks_at_hand(str(programs), 5, False)] == []
    (window,) = humaneval.windows(programs)
    assert (window.context, window.target) == (ADD["prompt"], ADD["canonical_solution"])
    words = ["--suite=tasks", "--tasks=humaneval", f"--data={programs}", "--dry-run"]
    assert main(["eval", "headway-tiny", *words]) == 0
    assert "text: humaneval, 1 passages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("    return a + b\n", True),
        ("```python\ndef add(a, b):\n    return a + b\n```\nThat adds.", True),
        ("    return a - b\n", False),
        ("I do not know.", False),
        ("    return \ud800", False),
        ("    open('x', 'wb').write(b'0' * (1 << 22))\n    return 5", False),
    ],
)
def test_a_program_is_right_when_its_tests_pass(reply: str, right: bool):
    assert humaneval.passes(ADD, reply) is right


def test_a_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(humaneval, "TIMEOUT_S", 1)
    assert not humaneval.passes(ADD, "    while True: pass\n")


def test_tasks_at_hand_are_asked_of_a_model_that_can_do_them():
    def task(name: str, known: int) -> EvalTask:
        return EvalTask(name, [one(f"{name} {i}", i < known) for i in range(10)], (), 8)

    def one(text: str, known: bool) -> TaskQuestion:
        answers.update({text: "yes"} if known else {})
        return TaskQuestion(
            [{"role": "user", "content": text}], "yes", lambda reply: reply == "yes"
        )

    answers: dict[str, str] = {}
    tasks = [
        task("easy", 5),
        task("hard", 1),
        EvalTask("choose", (), [MultipleChoice("a", [" b", " c"], 0)]),
    ]
    found, notes = feasible_tasks(Scripted(answers), tasks)
    assert [each.name for each in found] == ["easy", "choose"]
    assert notes == ["hard not asked, for scripted has 1 of 8 right: --tasks hard asks it"]


def test_tasks_are_paired_and_do_not_decide_without_the_power():
    def report(right: int) -> Any:
        questions = [
            TaskQuestion([{"role": "user", "content": str(i)}], "", lambda reply: reply == "yes")
            for i in range(100)
        ]
        wanted = suites.EvalSettings(
            skills=[], levels=[1], questions=1, seed=0, corpora=None,
            tasks=[EvalTask("mine", questions, (), 8)],
        )  # fmt: skip
        return suites.evaluate(Scripted({str(i): "yes" for i in range(right)}), "here", wanted)

    alike = suites.side_by_side(report(90), report(89), tolerance=0.02)
    assert [(m.name, m.verdict) for m in alike.measures] == [("task mine", "cannot tell")]
    assert alike.failed, "nothing else was asked"
    worse = suites.side_by_side(report(90), report(60), tolerance=0.02)
    assert worse.measures[0].verdict == "worse" and worse.measures[0].only_first == 30
