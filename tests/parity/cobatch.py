"""Requests of random parameters, and the same tokens alone and in a mix of engines."""

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from drive import Answer, engine_for, finish
from guessing import Guesser
from headway.core import grammar as grammars
from headway.core.grammar import Grammar
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.engine.sequence import Sequence
from headway.engine.speculation import Speculator
from parity.tiny import save, tiny_model

VOCABULARY = 61
LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 {}[]:,."-+_!?<>=/*()'
SPECIALS = ["<unk>", "<s>", "</s>"]
MAX_LEN = 64
ALONE = {"max_num_seqs": 4, "block_size": 16}
ENGINES = [
    {"num_blocks": 8, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 16},
    {"num_blocks": 20, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 7},
    {"num_blocks": 70, "block_size": 1, "max_num_seqs": 16, "max_num_batched_tokens": 64},
    {"num_blocks": 6, "block_size": 16, "max_num_seqs": 6, "attention_backend": "reference"},
    {"num_blocks": 7, "block_size": 16, "max_num_seqs": 7, "max_num_batched_tokens": 20},
    {"num_blocks": 17, "block_size": 5, "max_num_seqs": 2, "max_num_batched_tokens": 2},
    {"num_blocks": 9, "block_size": 8, "max_num_seqs": 5, "attention_backend": "sdpa"},
]


def rounded_engines(folder: Path, **options: object) -> tuple[Engine, list[Engine]]:
    """An engine for one request at a time and some with little room, of a model of a few weights.

    `options` are formats of weights and KV. All have native attention: rounded activations turn the
    last bit of another backend's into a step of 1/127.
    """
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    save(tiny_model("llama", **shape, max_position_embeddings=MAX_LEN), folder)
    write_letters(folder)
    rooms = [{**room, "attention_backend": "auto"} for room in ENGINES]
    engines = [engine_for(folder, **room, **options) for room in rooms]
    return engine_for(folder, **ALONE, **options), engines


def write_letters(folder: Path) -> None:
    """A tokenizer of one character a token, so that grammars have something to say."""
    tokens = [*SPECIALS, *LETTERS[: VOCABULARY - len(SPECIALS)]]
    byte_level = {" ": "\u0120"}
    vocab = {byte_level.get(token, token): i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))


GRAMMARS: list[Grammar] = [
    grammars.regex("[a-f]{2,40}!", "p"),
    grammars.regex("(ab|ba|[0-9]){1,30}", "p"),
    grammars.choice(["yes", "no", "yes and no"], "p"),
    grammars.context_free('start: "(" start ")" start | "[" start "]" start | "."', "p"),
    grammars.json_schema({"type": "array", "items": {"enum": [1, "x", None]}}, "p"),
    grammars.json_schema(
        {"properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["b"]}, "p"
    ),
    grammars.json_object("p"),
]


def random_sampling(rng: random.Random) -> SamplingParams:
    """Any mix of parameters; three in four requests are greedy or seeded."""

    def maybe(value: object, neutral: object, chance: float = 0.3) -> object:
        return value if rng.random() < chance else neutral

    def some(most: int) -> list[int]:
        return rng.sample(range(VOCABULARY), rng.randint(1, most))

    max_tokens = rng.randint(1, 30)
    grammar = rng.choice(GRAMMARS) if rng.random() < 0.35 else None
    free = grammar is None
    return SamplingParams(
        grammar=grammar,
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.choice([0.0, rng.uniform(0.2, 2), 1.0]),
        seed=maybe(rng.randint(-(2**63), 2**63 - 1), None, 0.7),
        top_k=maybe(rng.randint(1, 70), 0),
        top_p=maybe(rng.random(), 1.0),
        min_p=maybe(rng.random() / 2, 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=maybe({t: rng.uniform(-5, 5) for t in some(5)}, {}),
        allowed_token_ids=maybe([*some(20), 5], [], 0.1 if free else 0),
        max_tokens=max_tokens,
        min_tokens=maybe(rng.randint(0, max_tokens), 0, 0.3 if free else 0),
        stop_token_ids=maybe(some(4), []),
        ignore_eos=rng.random() < 0.5,
        logprobs=maybe(rng.randint(0, 5), None),
        prompt_logprobs=maybe(rng.randint(0, 3), None, 0.2),
    )


def random_request(rng: random.Random, request_id: int) -> Request:
    """A short prompt and random parameters; prompts of 1 and at block borders are frequent."""
    length = rng.choice([1, 4, 8, 16, 17, rng.randint(1, 33)])
    prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
    sampling = random_sampling(rng)
    if sampling.allowed_token_ids:  # where only stop tokens are allowed nothing can be sampled
        sampling.min_tokens = 0
    return Request(request_id, prompt, sampling)


def same(ours: Answer, expected: Answer) -> None:
    """The same tokens for the same reason, with the same log-probabilities."""
    assert ours.token_ids == expected.token_ids
    assert ours.finish_reason == expected.finish_reason
    for name in ("logprobs", "prompt_logprobs"):
        found, wanted = getattr(ours, name) or [], getattr(expected, name) or []
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.token_id, len(one.top_ids)) == (other.token_id, len(other.top_ids))
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def check_mix(
    number: int,
    alone: Engine,
    engines: list[Engine],
    kept: list[int] | None = None,
    speculator: Speculator | None = None,
) -> int:
    """Run mix `number` together and alone; returns how many preemptions it had.

    Where `kept` is given, most tokens are guessed beforehand; it gains how many guesses were right.
    Or `speculator` guesses.
    """
    rng = random.Random(number)
    engine = engines[number % len(engines)]
    requests = [random_request(rng, 1000 * number + i) for i in range(rng.randint(2, 14))]
    truth = finish(alone, requests) if kept is not None else {}

    def known(sequence: Sequence) -> list[int]:
        answer = truth[sequence.request.request_id, sequence.index]
        return list(answer.token_ids)

    guesser = Guesser(random.Random(number), VOCABULARY, known)
    engine.scheduler.drafts.speculator = guesser if kept is not None else speculator
    aborts = {rng.randrange(30): request for request in requests if rng.random() < 0.15}
    aborted = {request.request_id for request in aborts.values()}
    before = engine.scheduler.num_preemptions

    def abort(step: int) -> None:
        if step in aborts:
            engine.abort(aborts[step].request_id)

    answers = finish(engine, requests, each_step=abort)
    engine.scheduler.drafts.speculator = None
    if kept is not None:
        kept.append(guesser.num_kept)
    for request in requests:
        if request.sampling.temperature > 0 and request.sampling.seed is None:
            continue
        expected = finish(alone, [request])
        for index in range(request.sampling.n):
            ours = answers[request.request_id, index]
            if request.request_id in aborted and ours.finish_reason is None:
                wanted = expected[request.request_id, index].token_ids
                assert ours.token_ids == wanted[: len(ours.token_ids)]
            else:
                same(ours, expected[request.request_id, index])
    return engine.scheduler.num_preemptions - before
