"""Units of texts, which of them stay, and the process that says how surprising they are."""

import json
import random
import sys
from pathlib import Path

import pytest

from headway.core.errors import EngineDownError
from headway.frontend.shorten.choose import SeenUnits, by_chance, choose, relevance
from headway.frontend.shorten.scorer import Scorer, fingerprint
from headway.frontend.shorten.units import split

TEXTS = (
    "Anna has a kite. Tom has none.",
    "fox: 1, cat: 2, cow: 3, bee: 4.\n\nOnce there was a fox. The end.",
    'He said "No." Then he left!\n\n- one\n- two\n',
    "今日は晴れ。明日は雨。",
    "no end",
    " \n ",
    "",
    "e.g. this, and that",
)


@pytest.mark.parametrize("text", TEXTS)
def test_units_are_the_text_again(text):
    units = split(text).units
    assert "".join(units) == text
    assert split(text).keep([True] * len(units)) == text
    assert all(unit.strip() for unit in units) or len(units) == 1


def test_sentences_lines_and_items_are_units():
    assert split("Anna has a kite. Tom has none.").units == ["Anna has a kite.", " Tom has none."]
    assert split("a: 1, b: 2, c: 3, d: 4.").units == ["a: 1,", " b: 2,", " c: 3,", " d: 4."]
    assert split("A fox, a cat and a cow.").units == ["A fox, a cat and a cow."]
    assert split("one\n\ntwo\n").units == ["one", "\n\ntwo\n"]
    assert split("a: 1, b: 2, c: 3, d: 4.").keep([True, False, True, False]) == "a: 1, c: 3"
    assert split("a: 1, b: 2, c: 3, d: 4.").keep([False, True, False, True]) == "b: 2, d: 4."


@pytest.mark.parametrize(
    ("text", "kept", "left"),
    [
        ('[{"a": 1}, {"a": 2}, {"a": 3}]', [True, False, True], '[{"a": 1}, {"a": 3}]'),
        ('{"n":1,"rows":[1,2,3]}', [False, True, False], '{"n":1,"rows":[2]}'),
        ('{"a": {"b": ["x", "y"]}, "c": "é"}', [True, False], '{"a": {"b": ["x"]}, "c": "é"}'),
        ("[\n  1,\n  2\n]", [False, True], "[\n  2\n]"),
    ],
)
def test_json_that_is_cut_stays_json(text, kept, left):
    assert split(text).keep(kept) == left
    json.loads(left)
    assert split(text).keep([True] * len(kept)) == text


@pytest.mark.parametrize("text", ['{"a": 1}', "[1]", "{not json. Really.", "[" * 5000])
def test_what_has_no_list_is_text(text):
    assert "".join(split(text).units) == text


def test_the_best_units_that_have_room_stay():
    none = [False] * 4
    assert choose([4, 4, 4, 4], none, [1, 3, 9, 2], 0.5).mask == [False, True, True, False]
    assert choose([9, 4, 4, 3], none, [9, 3, 2, 1], 0.4).mask == [False, True, True, False]
    assert choose([5, 5], [False] * 2, [1, 1], 0.5).mask == [True, False]


def test_one_unit_stays_whatever_its_size():
    choice = choose([50, 60], [False, False], [1, 2], 0.1)
    assert choice.mask == [False, True] and choice.num_tokens_after == 60
    assert choose([5], [True], [0], 0.5).mask == [True]
    assert choose([0], [False], [0], 0.5).mask == [True]


def test_what_was_said_goes_first():
    seen = SeenUnits()
    assert seen.repeated(["Anna has a kite. ", "Yes. ", "Anna has a kite."]) == [False, False, True]
    assert seen.repeated(["Anna has a kite,", "Yes. "]) == [True, False]
    choice = choose([4, 4, 4], [False, True, False], [1.0, 9.0, 2.0], 0.9)
    assert choice.mask == [True, False, True]
    assert (choice.num_tokens, choice.num_tokens_after, choice.num_duplicate) == (12, 8, 4)


def test_never_more_than_asked_and_the_same_again():
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.randint(1, 40) for _ in range(rng.randint(2, 30))]
        scores = [rng.random() for _ in sizes]
        repeated = [rng.random() < 0.2 for _ in sizes]
        keep = rng.choice((0.8, 0.5, 0.3))
        choice = choose(sizes, repeated, scores, keep)
        assert choice == choose(sizes, repeated, scores, keep)
        assert choice.num_tokens_after == sum(s for s, stays in zip(sizes, choice.mask) if stays)
        assert choice.num_tokens_after <= keep * sum(sizes) or sum(choice.mask) == 1


def test_a_rare_word_of_the_question_counts_more():
    units = ["the fox: 1", "the cat: 2", "the cow: 3", "the cow: 4"]
    nats = relevance(units, "What is the number of the CAT, and of the cow?")
    assert nats[1] > nats[2] == nats[3] > nats[0] == 0.0
    assert relevance(units, "") == [0.0] * 4


def test_chance_is_the_same_for_the_same_text():
    assert by_chance(["a", "b"]) == by_chance(["a", "b"]) != by_chance(["a", "c"])


# ── the process ─────────────────────────────────────────────────────────────────────────────

COUNTS = """
import json, sys
for line in sys.stdin:
    units = json.loads(line)
    if "die" in units:
        sys.exit(1)
    open(sys.argv[1], "a").write(line)
    print(json.dumps([float(len(unit)) for unit in units]), flush=True)
"""


def test_a_text_is_read_once_for_each_who_sends_it(tmp_path: Path):
    log = tmp_path / "asked"
    scorer = Scorer([sys.executable, "-c", COUNTS, str(log)])
    try:
        for owner in ("mine", "mine", "yours"):
            assert scorer.surprisals(["abc", "de"], owner) == [3.0, 2.0]
        asked = log.read_text().splitlines()
        assert asked == ["[]", *['["abc","de"]'] * 2]
    finally:
        scorer.close()


def test_a_process_that_died_is_told_and_started_again(tmp_path: Path):
    scorer = Scorer([sys.executable, "-c", COUNTS, str(tmp_path / "asked")])
    try:
        with pytest.raises(EngineDownError, match="has ended"):
            scorer.surprisals(["die"])
        assert scorer.surprisals(["ab"]) == [2.0]
    finally:
        scorer.close()


def test_texts_are_told_apart():
    assert fingerprint("a", ["bc"]) != fingerprint("ab", ["c"]) != fingerprint("ab", ["", "c"])
    assert fingerprint("a", ["b", "c"]) == fingerprint("a", ("b", "c"))
