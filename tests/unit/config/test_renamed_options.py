"""Options under their old names: as a flag, a YAML key, a variable, an argument of `LLM`."""

import logging
import os
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.config.options import EngineOptions, LogOptions, ServerOptions, read_options
from headway.config.options.field import environment_name, flag_name
from headway.config.options.read import check_environment, fields_of
from headway.config.options.renamed import RENAMED_OPTIONS
from headway.config.options.vllm import BY_NAME
from headway.config.resolve import resolve
from headway.core.errors import UsageError
from headway.llm import make_options
from resolve_cases import machine, model

SERVE = (ServerOptions, EngineOptions, LogOptions)
PLACES = ("flag", "file", "environment", "LLM")
ENGINE_CASES = [
    ({"speculate": "off"}, "off", 8),
    ({"speculate": "auto"}, "lookup,suffixes,forced,lookahead", 8),
    ({"speculate": "lookup"}, "lookup", 8),
    ({"speculate": "suffixes"}, "suffixes", 8),
    ({"speculate": "forced"}, "forced", 8),
    ({"speculate": "lookahead"}, "lookahead", 8),
    ({"speculate": "forced, lookup,suffixes", "max_drafts": 5}, "forced,lookup,suffixes", 5),
    ({"speculate": "auto", "max_drafts": 64, "draft_model": "small"},
     "lookup,suffixes,forced,draft", 64),
    ({"speculate": "draft", "draft_model": "small"}, "draft", 8),
]  # fmt: skip
"""Engine options by their old names → `speculate` and `max_drafts` of `/stats`."""


def read(place, given, folder):
    """Option tables of `headway serve`, or of `LLM`, from options given in one place."""
    if place == "LLM":
        return {EngineOptions: make_options(given)}
    arguments, environment = [], {}
    if place == "flag":
        arguments = [f"{flag_name(name)}={value}" for name, value in given.items()]
    elif place == "environment":
        environment = {environment_name(name): str(value) for name, value in given.items()}
    else:
        file = folder / "headway.yaml"
        file.write_text("".join(f'{name}: "{value}"\n' for name, value in given.items()))
        arguments = ["--config", str(file)]
    return read_options(SERVE, arguments, environment)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("given", "sources", "most"), ENGINE_CASES)
def test_an_old_name_has_its_meaning(place, given, sources, most, tmp_path):
    options = read(place, given, tmp_path)[EngineOptions]
    shown = resolve(options, machine(), model())[0].to_stats()
    assert (shown["speculate"], shown["max_drafts"]) == (sources, str(most))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "LLM"])
def test_an_old_switch_has_its_meaning(place, tmp_path):
    """`LLM` has no gate, and no such option."""
    default = ServerOptions()
    assert read(place, {"kv_ungated": "false"}, tmp_path)[ServerOptions] == default
    assert read(place, {"kv_ungated": "true"}, tmp_path)[ServerOptions] != default
    for flags, same in ((["--kv-ungated"], False), (["--no-kv-ungated"], True)):
        assert (read_options(SERVE, flags, {})[0][ServerOptions] == default) == same


NEW = {
    "flag": {
        "speculate": "--speculate lookup,draft is --speculative-method ngram,draft now",
        "max_drafts": "--max-drafts is --num-speculative-tokens now",
        "kv_ungated": "--kv-ungated is --allow-unverified-kv now",
    },
    "environment": {
        "speculate": "HEADWAY_SPECULATE lookup,draft is HEADWAY_SPECULATIVE_METHOD ngram,draft now",
        "max_drafts": "HEADWAY_MAX_DRAFTS is HEADWAY_NUM_SPECULATIVE_TOKENS now",
        "kv_ungated": "HEADWAY_KV_UNGATED is HEADWAY_ALLOW_UNVERIFIED_KV now",
    },
    "file": {
        "speculate": "speculate lookup,draft is speculative_method ngram,draft now",
        "max_drafts": "max_drafts is num_speculative_tokens now",
        "kv_ungated": "kv_ungated is allow_unverified_kv now",
    },
}
NEW["LLM"] = {name: line for name, line in NEW["flag"].items() if name != "kv_ungated"}
VALUES = {"speculate": "lookup, draft", "max_drafts": "4", "kv_ungated": "true"}
TODAY = {
    "speculate": {"speculative_method": "ngram,draft"},
    "max_drafts": {"num_speculative_tokens": "4"},
    "kv_ungated": {"allow_unverified_kv": "true"},
}


@pytest.mark.parametrize(("place", "name"), [(p, name) for p in PLACES for name in NEW[p]])
def test_an_old_name_warns_once_with_the_new_name(place, name, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        old = read(place, {name: VALUES[name]}, tmp_path)
    prefix = f"--config {tmp_path / 'headway.yaml'}: " if place == "file" else ""
    assert caplog.messages == [f"{prefix}{NEW[place][name]}; the old name works in 0.3."]
    caplog.clear()
    assert old == read(place, TODAY[name], tmp_path) and not caplog.messages


@pytest.mark.parametrize(("place", "name"), [(p, name) for p in PLACES for name in NEW[p]])
def test_both_names_are_refused(place, name, tmp_path):
    given = {name: VALUES[name], **TODAY[name]}
    with pytest.raises(UsageError, match=r"old name of .*both are given") as caught:
        read(place, given, tmp_path)
    (new,) = TODAY[name]
    spelled = {"environment": environment_name(new), "file": new}.get(place, flag_name(new))
    assert caught.value.fix == f"Keep {spelled}."


def test_a_flag_wins_over_the_environment_whatever_their_names(tmp_path):
    """Flag, environment, file: the order of places is that of one name."""
    file = tmp_path / "headway.yaml"
    file.write_text("speculate: forced\nmax-drafts: 3\n")
    for flag, variable in (
        ("--speculate=suffixes", "HEADWAY_SPECULATIVE_METHOD"),
        ("--speculative-method=suffix", "HEADWAY_SPECULATE"),
    ):
        flags, environment = [f"--config={file}", flag], {variable: "lookahead"}
        tables, _, sources = read_options(SERVE, flags, environment)
        assert tables[EngineOptions].speculative_method == "suffix"
        tables, _, sources = read_options(SERVE, flags[:1], environment)
        assert tables[EngineOptions].speculative_method == "lookahead"
        assert sources == {"speculative_method": "environment", "num_speculative_tokens": "file"}


def test_old_values_have_no_place_under_the_new_name():
    for old, new in (("lookup", "ngram"), ("suffixes", "suffix"), ("forced", "grammar")):
        with pytest.raises(UsageError, match=f"'{old}' is not a source") as caught:
            resolve(EngineOptions(speculative_method=old), machine(), model())
        assert caught.value.fix == f"Use {new}."


def test_a_draft_model_without_a_method_means_auto():
    draft = {"draft_model": "small"}
    for given, sources in (
        (draft, "lookup,suffixes,forced,draft"),
        ({**draft, "speculative_method": "auto"}, "lookup,suffixes,forced,draft"),
        ({}, "off"),
    ):
        settings, _ = resolve(EngineOptions(**given), machine(), model())
        assert settings.to_stats()["speculate"] == sources
    with pytest.raises(UsageError, match="--speculative-method off does not use it"):
        resolve(EngineOptions(**draft, speculative_method="off"), machine(), model())


def test_a_dry_run_lists_old_names(capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HEADWAY_MAX_DRAFTS", "4")
    assert main(["serve", "--dry-run", "--kv-memory=8MiB", "--speculate=lookup"]) == 0
    shown = capsys.readouterr()
    lines = [
        "--speculate lookup is --speculative-method ngram now; the old name works in 0.3.",
        "HEADWAY_MAX_DRAFTS is HEADWAY_NUM_SPECULATIVE_TOKENS now; the old name works in 0.3.",
    ]
    listed = [line for line in shown.out.splitlines() if line.startswith("deprecated")]
    assert listed == [f"{'deprecated':<22} {line}" for line in lines]
    assert shown.err.splitlines() == [f"headway: {line}" for line in lines]
    assert main(["serve", "--dry-run", "--kv-memory=8MiB", "--speculative-method=ngram"]) == 0
    monkeypatch.delenv("HEADWAY_MAX_DRAFTS")
    assert main(["serve", "--dry-run", "--kv-memory=8MiB", "--speculative-method=ngram"]) == 0
    assert "deprecated" not in capsys.readouterr().out.rsplit("model   ", 1)[1]


def test_a_verb_without_the_option_knows_neither_name():
    with pytest.raises(UsageError, match="There is no option --max-drafts"):
        read_options([LogOptions], ["--max-drafts=4"], {})
    assert read_options([LogOptions], [], {"HEADWAY_MAX_DRAFTS": "4"})[2] == {}
    check_environment(SERVE, {"HEADWAY_MAX_DRAFTS": "4", "HEADWAY_KV_UNGATED": "1"})
    with pytest.raises(UsageError, match="HEADWAY_MAX_DRAFTS"):
        check_environment([LogOptions], {"HEADWAY_MAX_DRAFTS": "4"})


def test_a_renamed_option_has_two_names_and_its_line_in_the_page():
    page = (Path(__file__).resolve().parents[3] / "docs" / "options.md").read_text()
    names = fields_of(SERVE)
    for row in RENAMED_OPTIONS:
        assert row.new in names and row.old not in names and row.old not in BY_NAME
        assert f"| `{flag_name(row.old)}` | `{flag_name(row.new)}`" in page
