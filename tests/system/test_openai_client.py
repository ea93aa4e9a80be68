"""The official client gets what it asks for, from chat and from completions."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer
from tiny_model import CONTEXT, EOS
from tokenizers import Tokenizer

from conftest import StartServer

MESSAGES: Any = [{"role": "user", "content": "What is 2 + 3?"}]
PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
SEEDED: dict[str, Any] = {"model": "tiny", "temperature": 0.9, "top_p": 0.9, "seed": 5}
SEEDED["max_tokens"] = 24


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    """One completion; fields the client does not know go into the body as they are."""
    known = {name: fields.pop(name) for name in list(fields) if name in COMPLETION_FIELDS}
    return client.completions.create(**{**GREEDY, "prompt": PROMPT, **known}, extra_body=fields)


COMPLETION_FIELDS = frozenset(
    "model prompt echo logprobs max_tokens n stop seed temperature top_p logit_bias stream "
    "stream_options presence_penalty frequency_penalty".split()
)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    """One chat answer."""
    return client.chat.completions.create(**{**GREEDY, "messages": MESSAGES, **fields})


def streamed_texts(chunks: Any) -> dict[int, str]:
    """Choice → its text, from a stream of completion or chat chunks."""
    texts: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk.choices:
            part = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] += part or ""
    return dict(texts)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


# ── streamed is unstreamed ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_completion_is_the_unstreamed_one(
    client: openai.OpenAI, how: dict[str, Any], n: int
) -> None:
    whole = complete(client, **how, n=n)
    chunks = complete(client, **how, n=n, stream=True)
    assert streamed_texts(chunks) == {c.index: c.text for c in whole.choices}
    assert [c.index for c in whole.choices] == list(range(n))


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_is_the_unstreamed_one(
    client: openai.OpenAI, how: dict[str, Any], n: int
) -> None:
    whole = chat(client, **how, n=n)
    assert streamed_texts(chat(client, **how, n=n, stream=True)) == {
        c.index: c.message.content for c in whole.choices
    }
    assert all(c.message.role == "assistant" for c in whole.choices)
    assert whole.usage.completion_tokens == n * 24


def test_seeded_choices_differ_and_repeat(client: openai.OpenAI) -> None:
    first, second = (complete(client, **SEEDED, n=4) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in second.choices]
    assert texts != [
        choice.text for choice in complete(client, **{**SEEDED, "seed": 6}, n=4).choices
    ]


def test_half_characters_never_leave(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    halves = [tokenizer.token_to_id(piece) for piece in ("Ã", "©")]  # é is C3 A9
    fields = {"allowed_token_ids": halves, "temperature": 1, "seed": 1, "max_tokens": 40}
    whole = complete(client, **fields).choices[0].text
    pieces = [chunk.choices[0].text for chunk in complete(client, **fields, stream=True)]
    assert "".join(pieces) == whole
    assert "é" in whole and len(pieces) > 1  # a busy server joins those that wait


# ── the shape of a stream ───────────────────────────────────────────────────────────────────


def test_chat_chunks_have_one_id_a_role_first_and_usage_last(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, n=2, stream_options={"include_usage": True}))
    assert len({(c.id, c.created, c.model, c.object, c.system_fingerprint) for c in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].id.startswith("chatcmpl-") and chunks[0].system_fingerprint
    for index in (0, 1):
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == "length"
    *others, last = chunks
    assert last.choices == [] and all(c.usage is None for c in others)
    assert last.usage.completion_tokens == 48
    assert last.usage.total_tokens == last.usage.prompt_tokens + 48


def test_completion_chunks_have_one_id_and_usage_last(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert len({(c.id, c.created, c.model, c.object, c.system_fingerprint) for c in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices][-1] == "length"
    plain = list(complete(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)


def test_usage_comes_right_before_done(server: LiveServer) -> None:
    import urllib.request

    body = (
        b'{"model":"tiny","prompt":"the sea","max_tokens":3,"temperature":0,"stream":true,'
        b'"stream_options":{"include_usage":true}}'
    )
    with urllib.request.urlopen(server.url + "/v1/completions", body) as answer:
        events = answer.read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert '"choices":[]' in events[-2] and '"completion_tokens":3' in events[-2]
    assert not any(line.startswith("id:") for event in events for line in event.splitlines())


# ── where an answer ends ────────────────────────────────────────────────────────────────────


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=0, max_tokens=40).choices[0]
    tokens = answer.logprobs.tokens
    at = next(i for i in range(8, 30) if tokens[i].isalnum() and tokens[i + 1].isalnum())
    for stop in (tokens[at], tokens[at][-1] + tokens[at + 1][0]):
        expected = answer.text[: answer.text.index(stop)]
        for fields in ({"stop": stop}, {"stop": ["never there", stop]}):
            got = complete(client, max_tokens=40, **fields).choices[0]
            assert (got.text, got.finish_reason) == (expected, "stop")
            assert got.stop_reason == stop
            chunks = complete(client, max_tokens=40, stream=True, **fields)
            assert streamed_texts(chunks) == {0: expected}
        kept = complete(client, max_tokens=40, stop=stop, include_stop_str_in_output=True)
        assert kept.choices[0].text == expected + stop


def test_a_stop_string_ends_only_its_own_choice(client: openai.OpenAI) -> None:
    free = [c.text for c in complete(client, **SEEDED, n=3).choices]
    stop = next(
        free[0][i : i + 3]
        for i in range(10, 30)
        if not any(free[0][i : i + 3] in t for t in free[1:])
    )
    got = complete(client, **SEEDED, n=3, stop=stop)
    assert [c.finish_reason for c in got.choices] == ["stop", "length", "length"]
    assert [c.text for c in got.choices] == [free[0][: free[0].index(stop)], *free[1:]]


def test_stop_token_ids_end_the_answer(client: openai.OpenAI) -> None:
    whole = complete(client, return_token_ids=True).choices[0]
    stop_id = whole.token_ids[7]
    at = whole.token_ids.index(stop_id)
    got = complete(client, stop_token_ids=[stop_id], return_token_ids=True).choices[0]
    assert got.token_ids == whole.token_ids[: at + 1]
    assert (got.finish_reason, got.stop_reason) == ("stop", stop_id)
    assert whole.text.startswith(got.text) and len(got.text) < len(whole.text)


def test_max_tokens_by_either_name(client: openai.OpenAI) -> None:
    old = chat(client, max_tokens=5)
    new = client.chat.completions.create(
        model="tiny", temperature=0, messages=MESSAGES, max_completion_tokens=5
    )
    assert old.usage.completion_tokens == new.usage.completion_tokens == 5
    assert old.choices[0].message.content == new.choices[0].message.content
    assert old.choices[0].finish_reason == "length"


def test_lengths_default_to_16_and_to_the_context(client: openai.OpenAI) -> None:
    short = client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert short.usage.completion_tokens == 16
    full = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert full.usage.total_tokens == CONTEXT
    assert full.choices[0].finish_reason == "length"


def test_an_end_token_ends_unless_told_otherwise(client: openai.OpenAI) -> None:
    always_end = {str(EOS): 100}
    ended = complete(client, logit_bias=always_end)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert ended.usage.completion_tokens == 1
    later = complete(client, logit_bias=always_end, min_tokens=5, return_token_ids=True)
    tokens = later.choices[0].token_ids
    assert len(tokens) == 6 and tokens[-1] == EOS and EOS not in tokens[:-1]
    never = complete(client, logit_bias=always_end, ignore_eos=True, return_token_ids=True)
    assert never.choices[0].token_ids == [EOS] * 24
    assert (never.choices[0].text, never.choices[0].finish_reason) == ("", "length")
    shown = complete(
        client, logit_bias=always_end, ignore_eos=True, skip_special_tokens=False, max_tokens=2
    )
    assert shown.choices[0].text == "<|im_end|><|im_end|>"


# ── what steers the choice of tokens ────────────────────────────────────────────────────────


def test_logit_bias_and_allowed_ids_decide(client: openai.OpenAI) -> None:
    biased = complete(client, logit_bias={"70": 100}, max_tokens=4, return_token_ids=True)
    assert biased.choices[0].token_ids == [70] * 4
    allowed = complete(client, **SEEDED, allowed_token_ids=[70, 80], return_token_ids=True)
    assert set(allowed.choices[0].token_ids) <= {70, 80}


def test_penalties_and_filters_are_taken(client: openai.OpenAI) -> None:
    for fields in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.8},
    ):
        got = complete(client, **fields, max_tokens=40, return_token_ids=True)
        plain = complete(client, max_tokens=40, return_token_ids=True)
        assert len(set(got.choices[0].token_ids)) >= len(set(plain.choices[0].token_ids))
    greedy = complete(client, return_token_ids=True).choices[0].token_ids
    for fields in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        got = complete(client, temperature=1.5, seed=9, **fields, return_token_ids=True)
        assert got.choices[0].token_ids == greedy


# ── log-probabilities ───────────────────────────────────────────────────────────────────────


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=6)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6
    assert b"".join(bytes(e.bytes) for e in entries).decode() == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the likeliest
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    chunks = list(chat(client, logprobs=True, top_logprobs=3, max_tokens=6, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in entries]
    bare = chat(client, logprobs=True, max_tokens=2).choices[0].logprobs.content
    assert [e.top_logprobs for e in bare] == [[], []]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2, max_tokens=6).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))
    ]
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values())
        assert len(top) == 2
    chunks = list(complete(client, logprobs=2, max_tokens=6, stream=True))
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [t for p in parts for t in p.tokens] == logprobs.tokens
    assert [o for p in parts for o in p.text_offset] == logprobs.text_offset


def test_echo_puts_the_prompt_before_the_answer(client: openai.OpenAI) -> None:
    plain = complete(client, n=2).choices
    echoed = complete(client, n=2, echo=True).choices
    assert [c.text for c in echoed] == [PROMPT + c.text for c in plain]
    assert streamed_texts(complete(client, n=2, echo=True, stream=True)) == {
        c.index: c.text for c in echoed
    }


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt_as_lm_eval_asks(
    client: openai.OpenAI, tokenizer: Tokenizer, max_tokens: int
) -> None:
    prompts = [PROMPT, "the sea"]
    ids = [tokenizer.encode(text).ids for text in prompts]
    for prompt in (prompts, ids):
        answer = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens)
        assert [c.index for c in answer.choices] == [0, 1]
        for text, known, choice in zip(prompts, ids, answer.choices, strict=True):
            logprobs = choice.logprobs
            assert len(logprobs.tokens) == len(known) + max_tokens
            assert (
                len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.tokens)
            )
            assert choice.text.startswith(text) and "".join(logprobs.tokens) == choice.text
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            assert all(value <= 0 for value in logprobs.token_logprobs[1:])
            assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 2 * max_tokens
        assert answer.usage.prompt_tokens == sum(map(len, ids))


def test_scores_of_the_prompt_are_scores_of_the_answer(client: openai.OpenAI) -> None:
    """What the model said when it generated is what it says of the same tokens as a prompt."""
    start = [40, 50, 60]
    said = complete(client, prompt=start, logprobs=0, max_tokens=8, return_token_ids=True)
    choice = said.choices[0]
    again = complete(
        client, prompt=start + choice.token_ids, echo=True, logprobs=0, max_tokens=0
    ).choices[0]
    assert again.logprobs.token_logprobs[3:] == pytest.approx(
        choice.logprobs.token_logprobs, abs=1e-4
    )


def test_prompt_logprobs_are_by_token_id(client: openai.OpenAI) -> None:
    prompt = [40, 50, 60, 70]
    choice = complete(client, prompt=prompt, prompt_logprobs=2, max_tokens=1).choices[0]
    first, *others = choice.prompt_logprobs
    assert first is None and len(others) == 3
    for token_id, entry in zip(prompt[1:], others, strict=True):
        assert str(token_id) in entry and 2 <= len(entry) <= 3
        assert {"logprob", "rank", "decoded_token"} <= set(entry[str(token_id)])
    answer = chat(client, extra_body={"prompt_logprobs": 0}, max_tokens=1)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


def test_prompt_logprobs_of_one_token_are_a_null(client: openai.OpenAI) -> None:
    choice = complete(client, prompt=[40], prompt_logprobs=1, max_tokens=1).choices[0]
    assert choice.prompt_logprobs == [None]


# ── prompts in all their forms ──────────────────────────────────────────────────────────────


def test_prompts_as_texts_and_as_ids(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    texts = [PROMPT, "the sea", "a big red ball"]
    ids = [tokenizer.encode(text).ids for text in texts]
    alone = [complete(client, prompt=text).choices[0].text for text in texts]
    together = complete(client, prompt=texts)
    assert [c.text for c in together.choices] == alone
    assert [c.text for c in complete(client, prompt=ids).choices] == alone
    assert [c.text for c in complete(client, prompt=ids[0]).choices] == alone[:1]
    assert streamed_texts(complete(client, prompt=texts, stream=True)) == dict(enumerate(alone))
    assert together.usage.prompt_tokens == sum(map(len, ids))
    assert together.usage.completion_tokens == 3 * 24


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    texts = [PROMPT, "the sea"]
    alone = [c.text for text in texts for c in complete(client, **SEEDED, prompt=text, n=2).choices]
    together = complete(client, **SEEDED, prompt=texts, n=2)
    assert [c.index for c in together.choices] == [0, 1, 2, 3]
    assert [c.text for c in together.choices] == alone


def test_token_ids_come_back_on_request(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    choice = complete(client, return_token_ids=True).choices[0]
    assert choice.prompt_token_ids == tokenizer.encode(PROMPT).ids
    assert tokenizer.decode(choice.token_ids) == choice.text
    chunks = complete(client, return_token_ids=True, stream=True)
    assert [t for c in chunks for t in c.choices[0].token_ids or []] == choice.token_ids
    answer = chat(client, extra_body={"return_token_ids": True})
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert tokenizer.decode(answer.choices[0].token_ids) == answer.choices[0].message.content


def test_chat_is_the_template_applied(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    by_hand = complete(client, prompt=tokenizer.encode(text).ids).choices[0].text
    assert chat(client).choices[0].message.content == by_hand
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]}]
    assert chat(client, messages=parts).choices[0].message.content == by_hand
    started = [*MESSAGES, {"role": "assistant", "content": by_hand[:4]}]
    continued = chat(
        client,
        messages=started,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )
    assert tokenizer.decode(continued.prompt_token_ids).endswith(by_hand[:4])


# ── models ──────────────────────────────────────────────────────────────────────────────────


def test_models_are_listed_by_every_name(client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", "nickname"]
    assert all(card.object == "model" and card.owned_by == "headway" for card in cards)
    assert all(card.max_model_len == CONTEXT and card.created > 0 for card in cards)
    assert client.models.retrieve("nickname").id == "nickname"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_each_name_answers_as_it_was_called(client: openai.OpenAI) -> None:
    answers = {name: complete(client, model=name) for name in ("tiny", "nickname")}
    assert {name: answer.model for name, answer in answers.items()} == {n: n for n in answers}
    assert len({answer.choices[0].text for answer in answers.values()}) == 1


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        complete(client, model="another")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as too_long:
        chat(client, max_tokens=CONTEXT)
    assert too_long.value.code == "context_length_exceeded"


# ── a trained model, where there is one ─────────────────────────────────────────────────────


def test_the_trained_model_streams_its_story(stories: Path, start_server: StartServer) -> None:
    live = start_server(folder=stories).wait_ready()
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.completions.create(
                model=live.model, prompt=PROMPT, max_tokens=32, temperature=0, stream=True
            )
        )
    assert streamed_texts(chunks)[0].startswith(
        ", there was a little girl named Lily. She loved to play outside in the park."
    )
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
            client.chat.completions.create(model=live.model, messages=MESSAGES)
        assert refused.value.param == "messages"
