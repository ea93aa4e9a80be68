"""Claims about a server, asked of one whose every second is known."""

import pytest

from claim_world import ScriptedAsking, asked_of
from literature import caching, load
from literature.asking import TimedAnswer
from literature.claim import HOLDS, NOT_HERE, Finding, NotThereError


def figure(found: Finding, name: str) -> float:
    return next(f.value for f in found.figures if f.name.startswith(name))


# ── prompt caching ──────────────────────────────────────────────────────────────────────────


def test_a_known_beginning_saves_its_tokens():
    """4,096 tokens: a book of 3,868 and a question of 24, all but the last block known."""
    asking = ScriptedAsking(fixed_s=0.1)
    found = caching.book(asked_of(asking))
    prompt = figure(found, "prompt")
    assert 3800 < prompt < 4096 - caching.ANSWER
    warm_s = 0.1 + 1e-3 * (prompt - figure_of_cached(asking, prompt))
    saved = 100 * (1 - warm_s / (0.1 + 1e-3 * prompt))
    assert figure(found, "less time") == pytest.approx(saved, abs=1)
    assert found.verdict == HOLDS


def figure_of_cached(asking: ScriptedAsking, prompt: float) -> int:
    """Whole blocks of what stands before the question."""
    return int((prompt - caching.QUESTION) // 16) * 16


def test_without_a_cache_the_claims_do_not_hold():
    class Forgetful(ScriptedAsking):
        def one(self, *given):
            self._known.clear()
            return super().one(*given)

    subject = asked_of(Forgetful())
    for measure in (caching.book, caching.many_shot, caching.ten_turns, caching.first_line):
        assert measure(subject).verdict == NOT_HERE, measure.__name__


def test_cost_is_that_of_the_ledger():
    """1,000 tokens of which 900 cached and 10 answered: 100 + 90 + 50 of 1,050."""
    one = TimedAnswer(
        ttft_s=1.0, tpot_s=None, e2e_s=1.0, sent_s=0.0, prompt=1000, cached=900, output=10, text=""
    )
    less = caching.cheaper([one], 50.0)
    assert less.value == pytest.approx(100 * (1 - 240 / 1050))


def test_ten_turns_compute_their_own_words_alone():
    asking = ScriptedAsking(fixed_s=0.0)
    found = caching.ten_turns(asked_of(asking))
    assert found.verdict == HOLDS
    fresh, known = found.picture.series
    assert len(fresh.y) == caching.TURNS
    assert all(b < a for a, b in zip(fresh.y[1:], known.y[1:], strict=True))


def test_what_changes_first_is_found_last():
    found = caching.first_line(asked_of(ScriptedAsking()))
    rates = {f.name: f.value for f in found.figures[1:]}
    assert rates["as it is"] > 85 and rates["date in the last line"] > 80
    assert rates["date in the first line"] == 0
    assert rates["tools reordered"] < rates["as it is"] / 2
    with pytest.raises(NotThereError, match="cached"):
        caching.first_line(asked_of(ScriptedAsking(tells=False)))


def test_a_million_calls_are_counted_by_what_was_found():
    """992 of 1,000 tokens are whole blocks; 1 ms each, a million times, are 275 hours."""
    found = caching.million_calls(asked_of(ScriptedAsking(), repeats=5))
    assert found.figures[0].value == pytest.approx(0.992, abs=0.01)
    assert found.figures[1].value == pytest.approx(992 * 1e-3 * 1e6 / 3600, rel=0.03)


def test_a_server_that_tells_nothing_has_times_but_no_cost():
    names = [f.name for f in caching.book(asked_of(ScriptedAsking(tells=False))).figures]
    assert not any("cost" in name for name in names) and len(names) == 4


# ── load ────────────────────────────────────────────────────────────────────────────────────


def test_an_output_token_in_input_tokens_is_the_ratio_of_both():
    """0.1 s a token against 1 ms: 100."""
    found = load.hundred(asked_of(ScriptedAsking()))
    assert found.figures[0].value == pytest.approx(100)
    assert found.verdict == HOLDS
    slow = load.hundred(asked_of(ScriptedAsking(step_s=5e-3)))
    assert slow.figures[0].value == pytest.approx(5)
    assert slow.verdict == NOT_HERE


def test_patience_buys_what_rows_cost_little():
    """A step of 100 ms and 4 ms a row: at 26 at once both waits have doubled."""
    found = load.trade(asked_of(ScriptedAsking(row_s=0.004, token_s=1e-5)))
    assert found.verdict == HOLDS
    names = [f.name for f in found.figures]
    assert names[-2:] == ["16 at once", "64 at once"]
    lame = load.trade(asked_of(ScriptedAsking(row_s=0.1)))
    assert lame.verdict != HOLDS


def test_busy_tells_nothing_of_those_who_wait():
    """One lane: at half its rate most are in time, beyond it the queue grows."""
    subject = asked_of(ScriptedAsking(step_s=0.001, token_s=1e-4))
    level = load.Level(1, [1.0], 1 / 0.067, 0.02, 0.001)
    subject._made[load.levels] = [level]
    found = load.busy(subject)
    assert found.verdict == HOLDS
    assert figure(found, "miss at half") < 10
    assert figure(found, "busy beyond") > 90


def test_covered_time_is_the_union_of_all_spans():
    """0 to 2, 1 to 3 and 5 to 6 of 6 seconds are 4."""

    def span(from_s: float, to_s: float) -> TimedAnswer:
        return TimedAnswer(
            ttft_s=0, tpot_s=None, e2e_s=to_s - from_s, sent_s=from_s, prompt=1, cached=0,
            output=1, text="",
        )  # fmt: skip

    assert load.covered([span(1, 3), span(0, 2), span(5, 6)]) == pytest.approx(4 / 6)


def test_an_output_token_is_dearer_where_rows_are_dear():
    found = load.dearer(asked_of(ScriptedAsking(fixed_s=0.0, token_s=1e-3, step_s=0.128)))
    ours = found.figures[0].value  # 16 lanes of 1,000 tok/s against 64 of 1 / 0.128 s
    assert ours == pytest.approx(16_000 / 500, rel=0.1)
