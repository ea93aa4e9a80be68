"""The table of verbs: groups of the overview, jobs of a verb, old names with their warning."""

import json
import os
import re

import pytest

from headway.cli.main import REMOVED_VERBS, RENAMED_VERBS, VERBS, main, with_subcommand

GROUPS = {
    "serve": "serve run chat batch pull ls launch key",
    "measure": "bench eval doctor",
    "advise": "plan simulate tune",
    "compress": "quantize prune distill",
    "fleet": "gateway",
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)


def test_the_overview_has_the_verbs_by_group(capsys):
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    for group, names in GROUPS.items():
        block = shown.split(f"\n{group}:\n", 1)[1].split("\n\n", 1)[0]
        found = re.findall(r"^  headway (\w+)", block, re.MULTILINE)
        assert list(dict.fromkeys(found)) == names.split()
    assert all(f"headway {verb.usage} " in shown for verb in VERBS.values())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gateway", "drift", "a.yaml"], ("gateway drift", ["a.yaml"])),
        (["gateway", "a.yaml", "drift"], ("gateway", ["a.yaml", "drift"])),
        (["doctor", "--slo-target=0.9", "--rules"], ("doctor --rules", ["--slo-target=0.9"])),
        (["doctor", "--", "--rules"], ("doctor", ["--", "--rules"])),
        (["serve", "--rules"], ("serve", ["--rules"])),
        (["plan", "a.yaml", "--place"], ("plan --place", ["a.yaml"])),
    ],
)
def test_a_subcommand_comes_first_and_a_flag_anywhere(words, expected):
    assert with_subcommand(words[0], words[1:]) == expected


def test_old_names_work_with_one_warning(capsys):
    """`rules` needs no server: its output is that of the new name, byte for byte."""
    assert main(["doctor", "--rules"]) == 0
    new = capsys.readouterr()
    assert main(["rules"]) == 0
    old = capsys.readouterr()
    assert old.out == new.out and new.err == ""
    assert old.err == (
        "headway: headway rules is headway doctor --rules now; the old name works in 0.3.\n"
    )


@pytest.mark.parametrize("name", RENAMED_VERBS)
def test_every_old_name_is_a_row_by_its_new_name(name, capsys):
    assert RENAMED_VERBS[name] in VERBS and name not in VERBS
    assert main([name, "--help"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"headway {RENAMED_VERBS[name]}") and told.err.count("\n") == 1


@pytest.mark.parametrize("name", REMOVED_VERBS)
def test_a_removed_verb_ends_with_one_line(name, capsys):
    assert main([name, "x"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and f"headway {name} is gone" in told.err


def test_the_warning_is_json_where_the_log_is(capsys, monkeypatch):
    monkeypatch.setenv("HEADWAY_LOG_FORMAT", "json")
    assert main(["rules"]) == 0
    line = json.loads(capsys.readouterr().err)
    assert "headway doctor --rules" in json.dumps(line)


def test_help_of_a_verb_names_its_jobs(capsys):
    assert main(["gateway", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"headway gateway {job}" in shown for job in ("calibrate", "drift", "rollout"))
    assert main(["doctor", "--trace", "--help"]) == 0
    assert "--seconds" in capsys.readouterr().out
