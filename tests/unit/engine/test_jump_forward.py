"""Forced tokens without logits: where a grammar leaves one token, nobody samples it.

Over the checking fake: it holds the engine to what the runtime is told, and each answer to the one
without. The fake samples anything a mask allows, so a mask of one token gives that token.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_tokenizer import EOS, write_tokenizer
from fakes import FakeExecutor
from grammar_engine import TOKENS, VOCAB, Gained, ask, engine_of, finish
from headway.config.speculation_config import SpeculationConfig
from headway.core import grammar as grammars
from headway.core.errors import RequestError
from headway.core.grammar import Grammar
from headway.core.records import StepRecord
from headway.core.request import Request
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.vocabulary import VocabularySource
from headway.engine.sequence import MAX_FORCED
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.perf.model import StepModel

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 4},
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_a_citizen": {"type": "boolean"},
    },
    "required": ["first_name", "number_of_children", "is_a_citizen"],
    "additionalProperties": False,
}
LONG = "the quick brown fox jumps over the lazy dog and runs home"
RULES = [
    grammars.json_schema(PERSON, "p"),
    grammars.json_schema({"const": LONG}, "p"),
    grammars.regex(f"[ab]{LONG}[ab]", "p"),
    grammars.choice([f"{LONG}, yes", f"{LONG}, no"], "p"),
    Grammar(kind="structural", text='start: <|im_start|> "call " %json {"type": "boolean"}'),
    grammars.regex("[a-z]{5,30}", "p"),
    None,
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, TOKENS)
    made = Grammars(VocabularySource(str(folder), VOCAB, (EOS,)))
    yield made
    made.close()


def jumping(made: Grammars, **shape: object) -> Engine:
    """An engine that takes forced tokens without logits, and guesses nothing."""
    engine = engine_of(made, **shape)
    config = SpeculationConfig(sources=("forced",), num_speculative_tokens=0)
    engine.scheduler.drafts.speculator = AdaptiveSpeculator(config, StepModel())
    return engine


def told(gained: dict[tuple[int, int], Gained]) -> dict[tuple[int, int], tuple[object, ...]]:
    """What a client sees in the end."""
    return {
        key: (one.tokens, one.finish_reason, one.incomplete, one.last and one.last.stop_token_id)
        for key, one in gained.items()
    }


def run(engine: Engine, *requests: Request) -> list[StepRecord]:
    """The records of the steps that `requests` take, the last of which may do nothing."""
    records = []
    for request in requests:
        engine.add(request)
    while engine.wait_for_work():
        records.append(engine.step()[1])
        engine.check_integrity()
    return records


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "slo"])
def test_answers_are_those_without_whatever_is_preempted(made: Grammars, policy: str):
    """Random mixes in pools and budgets so small that rows are cut and sequences come back."""
    rng = random.Random(11)
    preemptions = forced = 0
    for mix in range(6):
        requests = [
            ask(
                rng.choice(RULES),
                mix * 100 + i,
                max_tokens=rng.choice([1, 2, 9, 40, 80]),
                n=rng.choice([1, 1, 3]),
                stop_token_ids=rng.choice([[], [rng.randrange(3, VOCAB)], [102, 113]]),
                logprobs=rng.choice([None, None, 0]),
                logit_bias=rng.choice([{}, {rng.randrange(VOCAB): -100.0}]),
                frequency_penalty=rng.choice([0.0, 2.0]),
            )
            for i in range(1, 7)
        ]
        shape = {
            "num_blocks": rng.choice([28, 60]),
            "budget": rng.choice([6, 9, 40]),
            "policy": policy,
        }
        engine = jumping(made, **shape)
        found = told(finish(engine, *requests))
        preemptions += engine.scheduler.num_preemptions
        assert found == told(finish(engine_of(made), *requests))
        fresh = jumping(made, **shape)
        forced += sum(record.num_forced for record in run(fresh, *requests))
    assert preemptions > 4 and forced > 100, (preemptions, forced)


def test_a_chain_joins_at_once_and_is_counted(made: Grammars):
    """56 letters in a sixteenth of the steps; records say what came, what was computed, sampled."""
    request = ask(grammars.regex(f"[ab]{LONG}[ab]", "p"))
    plain, jumped = run(engine_of(made), request), run(jumping(made), request)
    tokens = len(finish(engine_of(made), request)[1, 0].tokens)
    assert sum(record.num_sampled for record in plain) == tokens
    sampled = sum(record.num_sampled for record in jumped)
    assert sum(record.num_tokens > 0 for record in jumped) == sampled <= tokens / 8
    assert sampled + sum(record.num_forced for record in jumped) == tokens
    decodes = [record for record in jumped if record.num_decode_tokens]
    assert sum(record.num_forced_rows for record in jumped) == tokens - sampled
    assert all(record.num_prefill_tokens == 0 for record in decodes)
    assert all(record.num_forced <= MAX_FORCED for record in jumped)
    gained = sum(record.tokens_per_decode for record in decodes) / len(decodes)
    came_first = jumped[0].num_forced / len(decodes)  # with the prompt's step
    assert gained + came_first == pytest.approx((tokens - 1) / len(decodes))
    assert all(record.verify_s > 0 for record in jumped if record.num_forced_rows)
    assert not any(record.num_drafts for record in jumped)


def test_an_update_tells_how_many_were_forced(made: Grammars):
    engine = jumping(made)
    engine.add(ask(grammars.choice([LONG], "p"), max_tokens=20))
    updates = []
    while engine.wait_for_work():
        updates += engine.step()[0]
    assert [(len(u.token_ids), u.num_forced) for u in updates] == [(17, 16), (3, 2)]
    assert updates[-1].finish_reason == "length" and updates[-1].incomplete


def test_where_log_probabilities_are_asked_for_each_token_is_sampled(made: Grammars):
    records = run(jumping(made), ask(RULES[1], logprobs=0))
    assert sum(record.num_forced for record in records) == 0


def test_off_nothing_is_forced(made: Grammars):
    engine = engine_of(made)
    config = SpeculationConfig(sources=("lookup",), num_speculative_tokens=0)
    engine.scheduler.drafts.speculator = AdaptiveSpeculator(config, StepModel())
    assert sum(record.num_forced for record in run(engine, ask(RULES[1]))) == 0


def test_a_forced_end_token_ends_the_answer(made: Grammars):
    """A stop token id in the middle of a chain, and the grammar's end at the end of one."""
    whole = finish(engine_of(made), ask(RULES[1]))[1, 0].tokens
    stop = whole[7]
    request = ask(RULES[1], stop_token_ids=[stop])
    one = finish(jumping(made), request)[1, 0]
    assert one.tokens == whole[: whole.index(stop) + 1] and one.finish_reason == "stop"
    assert one.last is not None and one.last.stop_token_id == stop and one.incomplete
    one = finish(jumping(made), ask(RULES[1]))[1, 0]
    assert one.tokens == whole and one.finish_reason == "stop" and not one.incomplete


def test_what_would_forbid_a_forced_token_is_refused_or_changes_nothing(made: Grammars):
    """A bias is finite: the one token is drawn all the same. Two lists of what may come are one
    too many."""
    whole = finish(engine_of(made), ask(RULES[1]))[1, 0].tokens
    bias = dict.fromkeys(whole, -100.0)
    assert finish(jumping(made), ask(RULES[1], logit_bias=bias))[1, 0].tokens == whole
    for more in ({"allowed_token_ids": [EOS]}, {"min_tokens": 5}):
        with pytest.raises(RequestError, match="exclude each other"):
            ask(RULES[1], **more)


def test_a_long_forced_text_takes_its_turns(made: Grammars):
    """A chain is bounded, and others gain a token in each step."""
    engine = jumping(made)
    engine.add(ask(grammars.regex("a{5000}", "p"), 1, max_tokens=300))
    engine.add(ask(None, 2, max_tokens=10, ignore_eos=True))
    told: dict[int, list[int]] = {1: [], 2: []}
    while engine.wait_for_work():
        for update in engine.step()[0]:
            told[update.request_id].append(len(update.token_ids))
    assert told[2] == [1] * 10 and max(told[1]) <= 1 + MAX_FORCED


def test_a_step_that_breaks_is_run_again_with_its_forced_tokens(made: Grammars):
    requests = [ask(rule, number, max_tokens=60) for number, rule in enumerate(RULES, 1)]
    expected = told(finish(engine_of(made), *requests))
    for stage in ("submit", "sample", "collect"):
        for at in range(1, 5):
            engine = jumping(made, budget=7)
            assert isinstance(engine.executor, FakeExecutor)
            gained: dict[int, list[int]] = {request.request_id: [] for request in requests}
            for request in requests:
                engine.add(request)
            number = 0
            while engine.wait_for_work():
                number += 1
                engine.executor.fail_at = stage if number == 3 * at else ""
                for update in engine.step()[0]:
                    gained[update.request_id] += update.token_ids
                engine.check_integrity()
            for request_id, tokens in gained.items():
                assert tokens == expected[request_id, 0][0], (stage, at)


def test_an_abort_in_the_middle_of_a_chain_leaves_nothing(made: Grammars):
    engine = jumping(made, budget=6)
    for steps in range(1, 9):
        engine.add(ask(RULES[1], steps, n=2))
        for _ in range(steps):
            engine.wait_for_work()
            engine.step()
        engine.abort(steps, steps % 2)
        engine.check_integrity()
        engine.abort(steps)
        engine.step()
        engine.check_integrity()
        assert not engine.num_requests and not engine.kv.num_used


def test_the_mask_decides_and_not_the_text(made: Grammars, tmp_path: Path):
    """`only_token` gives a token exactly where the mask of the next token has one bit."""
    rng, seen = random.Random(2), [0, 0]
    for number, rule in enumerate(RULES[:-1]):
        assert rule is not None
        compiled = made.builder.build(rule).compiled
        assert compiled is not None
        for _ in range(8):
            state = compiled.state()
            while not state.is_complete and state.num_accepted < 80:
                matcher = state.matcher([])
                mask = int.from_bytes(matcher.compute_bitmask(), "little")
                allowed = [token for token in range(VOCAB) if mask >> token & 1]
                only = state.only_token()
                seen[only is not None] += 1
                assert only == (allowed[0] if len(allowed) == 1 else None) or only is None
                assert only is None or mask.bit_count() == 1, number
                assert state.accept(rng.choice(allowed))
    assert min(seen) > 100, seen
