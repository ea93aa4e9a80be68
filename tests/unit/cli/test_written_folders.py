"""What the verbs that write folders say: progress, loss curves, cards, the gate's options."""

from pathlib import Path

import pytest

from headway.cli.distill import curves, format_losses
from headway.cli.evaluate import Sources, selection_of
from headway.cli.gated import check_gate, eval_call, evaluate_folder
from headway.cli.main import VerbCall
from headway.config.options import (
    AgainstOptions,
    DistillOptions,
    EngineOptions,
    EvalOptions,
    GateOptions,
    PruneOptions,
)
from headway.config.options.against import reference_engine
from headway.config.options.read import read_options
from headway.core.errors import UsageError
from headway.core.progress import item_lines, steps_bar


def called(**gate: object) -> VerbCall:
    return VerbCall(
        options={GateOptions: GateOptions(**gate)},  # type: ignore[arg-type]
        positionals=[],
        sources={},
        switches=frozenset(),
    )


def test_items_without_a_terminal_are_lines_with_a_forecast(capsys: pytest.CaptureFixture[str]):
    times = iter([0.0, *(12.0 * item for item in range(1, 11))])
    advance = item_lines("Quantizing", 10, now_s=lambda: next(times))
    for _ in range(10):
        advance()
    assert capsys.readouterr().err.splitlines() == [
        "Quantizing: 3/10, 84 s left",
        "Quantizing: 6/10, 48 s left",
        "Quantizing: 9/10, 12 s left",
    ]


def test_progress_without_a_terminal_is_a_line_a_tenth(capsys: pytest.CaptureFixture[str]):
    """Each with the time left; a run that goes on at 40 of 100 does not tell the first ones."""
    with steps_bar("step", 100, done=40) as advance:
        for step in range(41, 101):
            advance(step, f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"step {step}/100" for step in (50, 60, 70, 80, 90, 100)
    ]
    assert all(line.endswith(" left") and "loss" in line for line in lines)


def test_losses_are_named_by_file_and_drawn_by_step(tmp_path: Path):
    assert (
        format_losses({"/data/books.txt": 0.25, "skills": 1.0}) == "books.txt 0.2500, skills 1.0000"
    )
    (tmp_path / "loss.csv").write_text(
        "step,/data/books.txt,skills,lr,seconds\n10,0.5,0.2,0.1,1\n20,0.4,0.1,0.1,2\n"
    )
    drawn = curves(tmp_path / "loss.csv", "student")
    assert drawn.startswith("<svg") and drawn.count("<polyline") == 2
    assert "student: loss" in drawn and "books.txt" in drawn and "/data/" not in drawn


def test_the_gate_asks_what_headway_eval_asks():
    gate = {"against": "headway-tiny", "gate": True, "tolerance": 0.01, "kl_tolerance": 0.5}
    options = eval_call(called(**gate, questions=3)).options[EvalOptions]
    assert (options.against, options.gate, options.suite) == ("headway-tiny", True, "auto")
    assert (options.tolerance, options.kl_tolerance, options.questions) == (0.01, 0.5, 3)
    texts = eval_call(called(**gate, eval_data="DATA", windows=7)).options[EvalOptions]
    assert (texts.suite, texts.data, texts.windows) == ("auto", "DATA", 7)


def test_a_gate_needs_something_to_compare_with(tmp_path: Path):
    with pytest.raises(UsageError, match="--gate needs"):
        check_gate(called(gate=True))
    check_gate(called())
    figures = evaluate_folder(called(), tmp_path, "student")
    assert not figures.failed and not figures.markdown


def test_training_texts_and_tested_texts_have_flags_of_their_own():
    arguments = ["--data=a.txt:0.5", "--data=skills", "--eval-data=DATA", "T", "S", "OUT"]
    options, positionals, _ = read_options((DistillOptions, GateOptions), arguments, {})
    assert options[DistillOptions].data == ["a.txt:0.5", "skills"]
    assert options[GateOptions].eval_data == "DATA" and positionals == ["T", "S", "OUT"]
    options, _, _ = read_options((PruneOptions, GateOptions), ["--neurons=0.375"], {})
    assert options[PruneOptions].neurons == 0.375 and options[PruneOptions].pattern == "any"
    with pytest.raises(UsageError, match="out of range"):
        read_options((PruneOptions, GateOptions), ["--neurons=1"], {})


def test_windows_of_a_file_hold_for_b_alone(monkeypatch: pytest.MonkeyPatch):
    """`headway eval FOLDER --kv-layers FILE --against FOLDER`: A is the whole model."""
    opened = []

    def folder_model(folder: Path, *, name: str, **options: str) -> str:
        opened.append((name, options))
        return name

    monkeypatch.setattr("headway.whole_model.FolderModel", folder_model)
    monkeypatch.setattr("headway.evals.suites.evaluate_both", lambda a, b, wanted: (a, b))
    call = eval_call(called(against="headway-tiny"))
    engine = EngineOptions(kv_layers="kv.yaml", threads=2)
    call.options[EngineOptions] = engine
    whole = reference_engine(engine, AgainstOptions())
    Sources(call, selection_of(call.options[EvalOptions]), whole)._both("headway-tiny")
    assert opened == [
        ("headway-tiny --kv-layers kv.yaml", {"threads": "2", "kv_layers": "kv.yaml"}),
        ("headway-tiny", {"threads": "2"}),
    ]
