"""Structured output in the engine: waiting, masks, ends, refusals, preemption; no model needed.

The runtime is the checking fake with a byte-level vocabulary: it samples anything the mask allows,
and fails a row that has a mask and no grammar, or a grammar and no mask.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from byte_tokenizer import EOS, write_tokenizer
from fakes import FakeExecutor
from grammar_engine import TOKENS, VOCAB, ask, engine_of, finish, follows, text_of
from headway.core import grammar as grammars
from headway.core.errors import RequestError
from headway.core.grammar import Grammar
from headway.core.request import Principal
from headway.engine.grammar.compiler import compile_grammar
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.state import Compiled
from headway.engine.grammar.vocabulary import VocabularySource, load_vocabulary
from headway.frontend.text import Tokenizer

FOUND = {"type": "object", "properties": {"found": {"type": "boolean"}}, "required": ["found"]}
CLOSED = FOUND | {"additionalProperties": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, TOKENS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def source(folder: Path) -> VocabularySource:
    return VocabularySource(str(folder), VOCAB, (EOS,))


@pytest.fixture(scope="module")
def shared_grammars(source: VocabularySource) -> Iterator[Grammars]:
    """One for most tests: the vocabulary and the child process are made once."""
    made = Grammars(source)
    yield made
    made.close()


RULES = [
    grammars.json_schema(CLOSED, "p"),
    grammars.regex("(ab|cd){2,5}[0-9]", "p"),
    grammars.choice(["yes", "no", 'é "q"\n\\ /x/ \u0001'], "p"),
    grammars.context_free('start: "<" WORD ">"\nWORD: /[a-z]{1,9}/', "p"),
    Grammar(kind="structural", text='start: <|im_start|> %json {"type": "boolean"}'),
]


def test_every_kind_gives_what_it_says(shared_grammars: Grammars, tokenizer: Tokenizer):
    requests = [ask(rule, number) for number, rule in enumerate(RULES * 3, 1)]
    gained = finish(engine_of(shared_grammars), *requests, ask(None, 99, max_tokens=9))
    for request in requests:
        rule, one = request.sampling.grammar, gained[request.request_id, 0]
        assert rule is not None
        assert follows(rule, text_of(tokenizer, one)), (rule, text_of(tokenizer, one))
        assert one.finish_reason == "stop" and not one.incomplete
    assert len(gained[99, 0].tokens) == 9 or gained[99, 0].finish_reason == "stop"


def test_json_object_is_an_object(shared_grammars: Grammars, tokenizer: Tokenizer):
    gained = finish(engine_of(shared_grammars), ask(grammars.json_object("p"), max_tokens=380))
    one = gained[1, 0]
    text = text_of(tokenizer, one)
    assert text.startswith("{")
    if one.finish_reason == "stop":
        assert isinstance(json.loads(text), dict) and not one.incomplete
    else:
        assert one.finish_reason == "length" and one.incomplete


def test_the_grammars_end_is_the_answers_end(shared_grammars: Grammars, tokenizer: Tokenizer):
    """No end token is needed, the last token is shown, and `ignore_eos` changes nothing."""
    rule = grammars.regex("abc", "p")
    for more in ({}, {"ignore_eos": True}):
        one = finish(engine_of(shared_grammars), ask(rule, **more))[1, 0]
        assert text_of(tokenizer, one) == "abc"
        assert one.last is not None
        assert (one.last.finish_reason, one.last.stop_token_id) == ("stop", None)


def test_an_end_token_ends_where_more_could_follow(shared_grammars: Grammars, tokenizer: Tokenizer):
    """ "a" and "ab" are answers: after "a" comes b or the end, and the end is no text."""
    rule, ends = grammars.choice(["a", "ab"], "p"), []
    for number in range(1, 40):
        more = {"ignore_eos": number % 2 == 0}
        one = finish(engine_of(shared_grammars), ask(rule, number, **more))[number, 0]
        assert one.last is not None
        hidden = one.last.stop_token_id
        assert (hidden == EOS) == (one.tokens[-1] == EOS)
        assert one.finish_reason == "stop" and not one.incomplete
        ends.append(text_of(tokenizer, one))
    assert set(ends) == {"a", "ab"}


def test_a_document_cut_off_says_so(shared_grammars: Grammars):
    one = finish(engine_of(shared_grammars), ask(RULES[0], max_tokens=3))[1, 0]
    assert one.finish_reason == "length" and one.incomplete


def test_sequences_of_one_request_stand_where_they_stand(
    shared_grammars: Grammars, tokenizer: Tokenizer
):
    rule = grammars.regex("[a-d]{3,9}!", "p")
    gained = finish(engine_of(shared_grammars), ask(rule, n=5))
    texts = [text_of(tokenizer, gained[1, index]) for index in range(5)]
    assert all(re.fullmatch(rule.text, text) for text in texts) and len(set(texts)) > 2


def test_tokens_are_those_of_a_solo_run_whatever_is_preempted(shared_grammars: Grammars):
    """A pool so small that sequences lose their blocks and their grammar's state, and come back."""
    rng = random.Random(5)
    rules = [*RULES, *[grammars.regex(f"[a-z]{{{i},60}}", "p") for i in (20, 30, 40)], None]
    preemptions = 0
    for mix in range(6):
        requests = [
            ask(
                rng.choice(rules),
                mix * 100 + i,
                max_tokens=rng.randint(20, 60),
                n=rng.choice([1, 2]),
            )
            for i in range(1, 7)
        ]
        crowded = engine_of(shared_grammars, num_blocks=20, budget=9)
        together = finish(crowded, *requests)
        preemptions += crowded.scheduler.num_preemptions
        for request in requests:
            alone = finish(engine_of(shared_grammars), request)
            for key, one in alone.items():
                assert together[key].tokens == one.tokens
                assert together[key].finish_reason == one.finish_reason
                assert together[key].incomplete == one.incomplete
    assert preemptions > 8, "the pools are too large to prove much"


def test_a_step_that_breaks_runs_again_in_halves_with_its_masks(
    shared_grammars: Grammars,
):
    requests = [ask(rule, number) for number, rule in enumerate(RULES, 1)]
    expected = finish(engine_of(shared_grammars), *requests)
    for stage in ("submit", "sample", "collect"):
        engine = engine_of(shared_grammars)
        assert isinstance(engine.executor, FakeExecutor)
        for request in requests:
            engine.add(request)
        engine.step()
        engine.executor.fail_at = stage
        gained: dict[int, list[int]] = {request.request_id: [] for request in requests}
        while engine.wait_for_work():
            for update in engine.step()[0]:
                gained[update.request_id] += update.token_ids
        for request_id, tokens in gained.items():
            told = expected[request_id, 0].tokens
            assert tokens and told[-len(tokens) :] == tokens, stage


def test_a_request_goes_on_behind_the_tokens_another_engine_told(shared_grammars: Grammars):
    """After an engine's death: the grammar's state is that of the tokens told before."""
    for number, rule in enumerate(RULES, 1):
        request = ask(rule, number)
        whole = finish(engine_of(shared_grammars), request)[number, 0]
        for told in range(1, len(whole.tokens)):
            engine = engine_of(shared_grammars)
            engine.add(request, [whole.tokens[:told]])
            tokens: list[int] = []
            while engine.wait_for_work():
                for update in engine.step()[0]:
                    tokens += update.token_ids
                engine.check_integrity()
            assert tokens == whole.tokens[told:], (rule, told)


def test_others_run_while_a_grammar_is_compiled(source: VocabularySource):
    made = Grammars(source)
    try:
        engine = engine_of(made)
        engine.add(ask(RULES[0], 1))
        engine.add(ask(None, 2, max_tokens=4, ignore_eos=True))
        told: list[int] = []
        waiting: list[int] = []
        while engine.wait_for_work():
            updates, record = engine.step()
            told += [update.request_id for update in updates]
            waiting.append(record.num_waiting)
        assert told[:4] == [2, 2, 2, 2], "the free request did not wait"
        assert waiting[0] == 1 and 1 in told
        assert made.builder.build(RULES[0]).done, "the second time there is no waiting"
    finally:
        made.close()


def test_records_tell_what_compiling_and_masks_cost(source: VocabularySource):
    made = Grammars(source)
    try:
        engine = engine_of(made)
        engine.add(ask(RULES[0], 1))
        engine.add(ask(RULES[1], 2))
        records = []
        while engine.wait_for_work():
            records.append(engine.step()[1])
        assert len([s for record in records for s in record.compiles_s]) == 2
        assert all(record.mask_wait_s >= 0 for record in records)
        assert sum(record.mask_s > 0 for record in records) > 3
    finally:
        made.close()


@pytest.mark.parametrize(
    ("rule", "code", "words"),
    [
        (grammars.json_schema({"not": {"type": "string"}}, "f"), "unsupported_keyword", "not "),
        (grammars.json_schema({"uniqueItems": True}, "f"), "unsupported_keyword", "uniqueItems"),
        (
            grammars.json_schema({"if": {"const": 1}, "then": {}}, "f"),
            "unsupported_keyword",
            "if, then",
        ),
        (
            grammars.json_schema({"type": "string", "format": "colour"}, "f"),
            "unsupported_keyword",
            "format 'colour'",
        ),
        (
            grammars.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "f"),
            "unsupported_keyword",
            "oneOf",
        ),
        (
            grammars.json_schema({"$ref": "http://elsewhere.example/x"}, "f"),
            "unsupported_keyword",
            r"\$ref .*another document",
        ),
        (
            grammars.json_schema({"type": "string", "pattern": "(?=a)b"}, "f"),
            "unsupported_keyword",
            "pattern .*look-around",
        ),
        (
            grammars.json_schema({"properties": {"a": {}}, "minProperties": 3}, "f"),
            "unsupported_keyword",
            "minProperties",
        ),
        (
            grammars.json_schema(
                {"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "string"}}}, "f"
            ),
            "unsupported_keyword",
            "patternProperties",
        ),
        (grammars.json_schema({"type": "strin"}, "f"), "invalid_value", "Invalid type: strin"),
        (grammars.json_schema({"enum": []}, "f"), "invalid_value", "Unsatisfiable"),
        (grammars.regex("(", "f"), "invalid_value", "unclosed group"),
        (grammars.context_free("start: foo", "f"), "invalid_value", 'unknown name: "foo"'),
    ],
)
def test_what_cannot_be_compiled_is_a_400_that_names_it(
    shared_grammars: Grammars, rule: Grammar, code: str, words: str
):
    engine = engine_of(shared_grammars)
    gained = finish(engine, ask(rule, 1), ask(RULES[0], 2))
    ((request_id, error),) = engine.drain_refusals()
    assert (request_id, error.status, error.param, error.code) == (1, 400, "f", code)
    assert re.search(words, error.cause), error.cause
    assert "\n" not in error.cause and "<" not in error.cause
    assert gained[1, 0].tokens == [] and gained[2, 0].finish_reason == "stop"
    assert not engine.num_requests and not engine.drain_refusals()


def test_a_grammar_that_never_compiles_is_refused_and_the_next_is_not(source: VocabularySource):
    """Thirty patterns in one allOf would compile for hours; its process is killed."""
    bomb = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*b"} for i in range(30)]}
    made = Grammars(source, limit_s=0.2)
    try:
        engine = engine_of(made)
        gained = finish(engine, ask(grammars.json_schema(bomb, "f"), 1), ask(RULES[1], 2))
        ((_, error),) = engine.drain_refusals()
        assert (error.status, error.code, error.param) == (400, "grammar_too_complex", "f")
        assert gained[2, 0].finish_reason == "stop"
    finally:
        made.close()


def test_a_grammar_too_complex_in_the_middle_fails_alone(shared_grammars: Grammars):
    """Three thousand rules that all may come next are more than one row of the parser holds."""
    rules = [f"r{i}" for i in range(3000)]
    text = f"start: /[a-c]/ ({' | '.join(rules)})\n"
    text += "\n".join(f'{rule}: "k{rule}" start?' for rule in rules)
    engine = engine_of(shared_grammars)
    gained = finish(engine, ask(grammars.context_free(text, "f"), 1, n=2), ask(RULES[0], 2))
    ((request_id, error),) = engine.drain_refusals()
    assert (request_id, error.status, error.code) == (1, 400, "grammar_too_complex")
    assert gained[1, 0].finish_reason is None
    assert gained[2, 0].finish_reason == "stop"


def test_a_request_can_leave_while_its_grammar_is_compiled(source: VocabularySource):
    made = Grammars(source)
    try:
        engine = engine_of(made)
        for number, index in ((1, None), (2, 0)):
            engine.add(ask(RULES[number], number))
            engine.abort(number, index)
        gained = finish(engine, ask(RULES[3], 3))
        assert list(gained) == [(3, 0)] and gained[3, 0].finish_reason == "stop"
        assert not engine.num_requests
    finally:
        made.close()


def test_without_a_tokenizer_it_is_refused():
    engine = engine_of(None)
    with pytest.raises(RequestError, match="needs a tokenizer") as caught:
        engine.add(ask(grammars.regex("a", "structured_outputs.regex")))
    assert caught.value.param == "structured_outputs.regex"
    assert not engine.num_requests


def test_a_static_batch_that_waits_for_a_grammar_starts_when_it_is_flushed(
    source: VocabularySource,
):
    made = Grammars(source)
    try:
        engine = engine_of(made, batching="static", batch_window_s=0.05)
        engine.add(ask(RULES[0]))
        engine.flush()
        reasons = []
        while engine.wait_for_work():
            reasons += [update.finish_reason for update in engine.step()[0]]
        assert reasons[-1] == "stop" and not engine.num_requests
    finally:
        made.close()


def test_the_cache_is_bounded_in_bytes(source: VocabularySource):
    made = Grammars(source, cache_bytes=3 * 300_000)
    try:
        engine = engine_of(made)
        rules = [grammars.regex(f"x{{{i}}}", "p") for i in range(1, 9)]
        for number, rule in enumerate(rules, 1):
            finish(engine, ask(rule, number))
            assert made.builder.cached_bytes <= 3 * 300_000
        assert len(made.builder) == 3
        assert made.builder.build(rules[-1]).done
        assert not made.builder.build(rules[0]).done, "what was dropped is compiled again"
        finish(engine, ask(rules[0], 101))
    finally:
        made.close()


def test_compiled_grammars_are_not_shared_between_keys(source: VocabularySource):
    """Nobody can tell by waiting what another key has asked for."""
    made = Grammars(source)
    try:
        request = ask(RULES[1], 1)
        request.principal = Principal("one", cache_salt="a")
        finish(engine_of(made), request)
        assert made.builder.build(RULES[1], "a").done
        assert not made.builder.build(RULES[1], "b").done
    finally:
        made.close()


# ── the state alone ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def compiled(source: VocabularySource) -> Compiled:
    vocabulary = load_vocabulary(source)
    rule = grammars.json_schema({"type": "array", "items": CLOSED}, "p")
    matcher, first = compile_grammar(vocabulary, rule)
    return Compiled(matcher, first, 0, VOCAB, has_numbers=True)


def allowed(mask: bytes) -> list[int]:
    return np.nonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))[0].tolist()


def test_masks_are_as_wide_as_the_logits(compiled: Compiled):
    assert len(compiled.first_mask) == -(-VOCAB // 32) * 4
    assert max(allowed(compiled.first_mask)) < TOKENS


def test_a_state_goes_back_and_is_built_again(compiled: Compiled):
    """After any tokens: going back k gives the mask that was there, and replaying gives it too."""
    rng = random.Random(3)
    for _ in range(20):
        state, tokens, masks = compiled.state(), [], []
        for _ in range(rng.randint(1, 25)):
            masks.append(state.matcher(tokens).compute_bitmask())
            choices = [t for t in allowed(masks[-1]) if t < TOKENS]
            tokens.append(rng.choice(choices))
            assert state.accept(tokens[-1])
            if state.is_complete:
                break
        back = rng.randint(0, len(tokens))
        before = len(tokens) - back
        state.rollback(back)
        assert state.num_accepted == before
        if before < len(masks):
            assert state.matcher(tokens[:before]).compute_bitmask() == masks[before]
            state.release()
            assert state.matcher(tokens[:before]).compute_bitmask() == masks[before]
            assert state.num_accepted == before


def test_a_token_the_grammar_forbids_is_an_error_that_stays(compiled: Compiled):
    state = compiled.state()
    state.matcher([])
    forbidden = next(t for t in range(TOKENS) if t not in allowed(compiled.first_mask))
    assert not state.accept(forbidden) and state.error
    assert not state.accept(forbidden) and not state.is_complete


def test_the_vocabulary_is_the_tokenizers(folder: Path, tokenizer: Tokenizer):
    """llguidance reads the same bytes for each token as we show."""
    vocabulary = load_vocabulary(VocabularySource(str(folder), TOKENS, (EOS,)))
    ordinary = [t for t in range(TOKENS) if t not in tokenizer.special_ids]
    differing = [t for t in ordinary if vocabulary.decode_bytes([t]) != tokenizer.piece(t)]
    assert [tokenizer.piece(t) for t in differing] in ([], [b"\xff"]), "0xff is its own marker"
