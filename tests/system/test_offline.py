"""`headway.LLM` in this process: the same tokens as the server's, in the order of the prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from tokenizers import Tokenizer

from headway import LLM, SamplingParams
from headway.core.errors import HeadwayError, RequestError, UsageError

PROMPTS = ["the sea", "Once upon a time", "a big red ball under the tree"]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    made = LLM(tiny_model, kv_memory="16MiB")
    yield made
    made.engine.step()  # tells the runtime of what was aborted last
    made.engine.check_integrity()
    assert not made.engine.has_work


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def served(server: LiveServer, path: str, **fields: Any) -> Any:
    """The choices the server gives to the same question."""
    status, answer = server.post(path, {"model": "tiny", "max_tokens": 16, **fields})
    assert status == 200, answer
    return answer["choices"]


def test_greedy_tokens_are_the_servers(llm: LLM, server: LiveServer) -> None:
    choices = served(
        server, "/v1/completions", prompt=PROMPTS, temperature=0, return_token_ids=True
    )
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [c["token_ids"] for c in choices]
    assert [o.outputs[0].text for o in outputs] == [c["text"] for c in choices]
    assert [o.prompt for o in outputs] == PROMPTS
    assert [o.prompt_token_ids for o in outputs] == [c["prompt_token_ids"] for c in choices]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_seeded_answers_are_the_servers(llm: LLM, server: LiveServer) -> None:
    fields = {"temperature": 0.9, "seed": 11, "n": 3}
    choices = served(server, "/v1/completions", prompt=PROMPTS[0], **fields)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=16, **fields))
    assert [o.text for o in output.outputs] == [c["text"] for c in choices]
    assert [o.index for o in output.outputs] == [0, 1, 2]


def test_chat_is_the_servers(llm: LLM, server: LiveServer) -> None:
    talks = [[{"role": "user", "content": text}] for text in PROMPTS]
    texts = [
        served(server, "/v1/chat/completions", messages=talk, temperature=0)[0]["message"][
            "content"
        ]
        for talk in talks
    ]
    assert [o.outputs[0].text for o in llm.chat(talks, GREEDY)] == texts
    assert llm.chat(talks[0], GREEDY)[0].outputs[0].text == texts[0]


def test_a_prompt_is_text_ids_or_a_dict(llm: LLM, tokenizer: Tokenizer) -> None:
    text, ids = PROMPTS[0], tokenizer.encode(PROMPTS[0]).ids
    forms = [text, [text], ids, [ids], {"prompt": text}, {"prompt_token_ids": ids}]
    forms += [[{"prompt": text}], [{"prompt_token_ids": ids}]]
    texts = {o.outputs[0].text for form in forms for o in llm.generate(form, GREEDY)}
    assert len(texts) == 1
    mixed = llm.generate([text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY)
    assert [o.prompt for o in mixed] == [text, None, text, None]
    assert {o.outputs[0].text for o in mixed} == texts


def test_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5 + i] * (1 + i % 7) for i in range(100)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (50 - i) % 20) for i in range(100)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    for i in (0, 33, 99):
        assert llm.generate(prompts[i], params[i])[0].outputs == outputs[i].outputs


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    stop = whole[4:7]
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=16, stop=stop))
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_logprobs_are_by_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate([[5, 6, 7]], params)
    answer = output.outputs[0]
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    chosen = [e[t].logprob for e, t in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert sum(chosen) == pytest.approx(answer.cumulative_logprob)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [6 in output.prompt_logprobs[1], 7 in output.prompt_logprobs[2]] == [True, True]


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    assert next(stream).token_ids
    stream.close()
    assert llm.engine.num_requests == 0 and llm.engine.kv.num_used == 0


def test_errors_come_before_anything_runs(llm: LLM) -> None:
    for prompt, params in (
        ([""], GREEDY),
        ([PROMPTS[0], []], GREEDY),
        ([PROMPTS[0], [100_000]], GREEDY),
        ([PROMPTS[0], [-1]], GREEDY),
        ([PROMPTS[0], [5] * 512], GREEDY),
        ([{}], GREEDY),
        ([PROMPTS[0], PROMPTS[1]], [GREEDY]),
        (PROMPTS, SamplingParams(stop_token_ids=[100_000])),
        (["\ud800"], GREEDY),
    ):
        with pytest.raises(RequestError):
            llm.generate(prompt, params)
        assert llm.engine.num_requests == 0
    for wrong in (
        {"temperature": -1},
        {"n": 0},
        {"max_tokens": 0},
        {"top_k": 2**70},
        {"stop": [""]},
    ):
        with pytest.raises(RequestError):
            SamplingParams(**wrong)
    assert llm.generate([], GREEDY) == []
    assert llm.generate(PROMPTS[0], GREEDY)[0].finished


def test_without_a_tokenizer_it_takes_ids(tiny_model: Path, llm: LLM, tokenizer: Tokenizer) -> None:
    bare = LLM(tiny_model, skip_tokenizer_init=True, kv_memory="16MiB")
    ids = tokenizer.encode(PROMPTS[0]).ids
    (output,) = bare.generate({"prompt_token_ids": ids}, GREEDY)
    assert output.outputs[0].token_ids == llm.generate(ids, GREEDY)[0].outputs[0].token_ids
    assert output.outputs[0].text == ""
    for refused in (
        lambda: bare.generate("text", GREEDY),
        lambda: bare.chat([{"role": "user", "content": "a"}], GREEDY),
        lambda: bare.generate(ids, SamplingParams(stop=["a"])),
    ):
        with pytest.raises(UsageError, match="skip_tokenizer_init"):
            refused()


def test_what_cannot_be_loaded_is_told(tiny_model: Path, tmp_path: Path) -> None:
    for folder, options in (
        (tmp_path, {}),
        (tmp_path / "none", {}),
        (tiny_model, {"dtype": "float8"}),
        (tiny_model, {"no_such_option": 1}),
        (tiny_model, {"max_model_len": 513}),
    ):
        with pytest.raises(HeadwayError) as refused:
            LLM(folder, **options)
        assert refused.value.cause and refused.value.fix
