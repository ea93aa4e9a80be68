"""Exact tokens of the embedded model, which is always there: alone, chunked, batched, preempted."""

import pytest

from headway import LLM, SamplingParams
from headway.cli.common import model_folder

GOLDEN = {
    "What is 2 + 3?": [20, 1167, 727, 971, 750, 16, 2],
    "Who are you?": [
        43,
        478,
        2302,
        15,
        2323,
        14,
        261,
        923,
        2225,
        424,
        1033,
        1494,
        70,
        273,
        297,
        504,
        341,
        554,
        16,
        2,
    ],
    "Reverse the letters: c a t": [86, 261, 279, 2],
}
TEXTS = {
    "What is 2 + 3?": "2 + 3 = 5.",
    "Who are you?": "I am headway-tiny, a small model embedded in Headway.",
    "Reverse the letters: c a t": "t a c",
}
SEEDED = [1635, 16, 300, 501, 459, 297, 1721, 263, 75, 754, 1414, 399, 399, 4, 14, 265]
"""What "Once upon a time" goes on with at temperature 0.8 and seed 7."""

GREEDY = SamplingParams(temperature=0, max_tokens=64)


def embedded(**options: object) -> LLM:
    return LLM(model_folder(None), dtype="float32", **options)


def chats(questions: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in questions]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 1},
        {"attention_backend": "reference"},
        {"attention_backend": "sdpa"},
    ],
    ids=str,
)
def test_answers_are_exact(options: dict[str, object]) -> None:
    llm = embedded(**options)
    for output, question in zip(llm.chat(chats(list(GOLDEN)), GREEDY), GOLDEN, strict=True):
        assert output.outputs[0].token_ids == GOLDEN[question]
        assert output.outputs[0].text == TEXTS[question]
        assert output.outputs[0].finish_reason == "stop"
    llm.engine.check_integrity()


def test_answers_are_exact_under_preemption() -> None:
    llm = embedded(kv_memory=360 * 1024, block_size=4, max_model_len=100)
    llm.engine.scheduler.room.predicts_growth = False
    questions = list(GOLDEN) * 6
    for output, question in zip(llm.chat(chats(questions), GREEDY), questions, strict=True):
        assert output.outputs[0].token_ids == GOLDEN[question]
    assert llm.engine.scheduler.num_preemptions > 0
    llm.engine.check_integrity()


def test_a_seed_gives_the_same_tokens_beside_others() -> None:
    llm = embedded()
    seeded = SamplingParams(temperature=0.8, seed=7, max_tokens=len(SEEDED))
    others = SamplingParams(temperature=1.0, top_k=5, max_tokens=20)
    outputs = llm.generate(["Once upon a time"] * 5, [others, seeded, others, seeded, others])
    assert outputs[1].outputs[0].token_ids == SEEDED
    assert outputs[3].outputs[0].token_ids == SEEDED


def test_streamed_is_whole() -> None:
    llm = embedded()
    assert llm.tokenizer is not None
    ids = llm.tokenizer.chat_ids([{"role": "user", "content": "Who are you?"}])
    deltas = list(llm.stream(ids, GREEDY))
    assert "".join(delta.text for delta in deltas) == TEXTS["Who are you?"]
    assert [t for delta in deltas for t in delta.token_ids] == GOLDEN["Who are you?"]
