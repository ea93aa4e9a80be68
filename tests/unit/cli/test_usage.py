"""Words and variables that nobody understands: refused by name, never dropped."""

import os

import pytest

from headway.cli.main import main


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("verb", "word"), [("serve", "api"), ("gateway", "api"), ("bench", "api"), ("run", "temp")]
)
def test_help_about_an_unknown_word_says_so(verb, word, capsys):
    assert main([verb, "--help=nosuchword"]) == 2
    told = capsys.readouterr()
    assert f"headway {verb} has no option about nosuchword." in told.err and not told.out
    assert main([verb, f"--help={word}"]) == main([verb, "--help=all"]) == 0
    assert f"--{word}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("HEADWAY_MAX_NUM_SEQ", "Did you mean HEADWAY_MAX_NUM_SEQS?"),
        ("HEADWAY_SERVICE_HOST", "enableServiceLinks: false"),
        ("HEADWAY_BATCH_WINDOW", "Write --batching dynamic:50ms"),
    ],
)
@pytest.mark.parametrize("verb", ["serve", "gateway", "key"])
def test_an_unknown_variable_is_refused(verb, variable, words, capsys, monkeypatch):
    monkeypatch.setenv(variable, "5")
    assert main([verb, "name"]) == 2
    told = capsys.readouterr().err
    assert variable in told and words in told


def test_a_variable_of_another_verb_is_let_be(capsys, monkeypatch):
    monkeypatch.setenv("HEADWAY_QUESTIONS", "5")
    monkeypatch.setenv("HEADWAY_FALLBACK_KEY", "secret")
    assert main(["key", "alice"]) == 0


def test_a_dry_run_says_given_of_what_is_given_alone(capsys):
    for given in ([], ["--speculative-method=ngram"]):
        assert main(["serve", "--dry-run", *given]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        found = [line for line in lines if line[-1:] == ["given"]]
        assert found == [["speculative_method", "ngram", "given"]] * len(given)


@pytest.mark.parametrize("arguments", [["run", "{}", "Hi"], ["chat", "{}"]])
@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/"])
def test_run_and_chat_say_what_asks_a_server(arguments, url, capsys):
    assert main([each.format(url) for each in arguments]) == 2
    told = capsys.readouterr().err
    assert f"{url} is a server" in told and "http://127.0.0.1:8000/v1/chat/completions" in told
