"""What was found, as clients are told, and who finds it: through the official clients."""

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from in_process import BLOCK, InProcess

KEYS = ["key-one", "key-two"]
PROMPT = list(range(300, 400))
FULL = 100 // BLOCK * BLOCK


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[InProcess]:
    opened = InProcess(tmp_path, api_key=KEYS, **getattr(request, "param", {}))
    try:
        yield opened
    finally:
        opened.close()


def found(server: InProcess, key: str, prompt: list[int], **more: object) -> tuple[int, list[int]]:
    """(cached tokens, the answer's ids) of one completion."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        done = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=30, temperature=0, seed=1,
            extra_body={"return_token_ids": True, "ignore_eos": True, **more},
        )  # fmt: skip
    return done.usage.prompt_tokens_details.cached_tokens, done.choices[0].token_ids


def test_the_second_turn_finds_the_first_and_its_answer(server: InProcess):
    cold, answer = found(server, KEYS[0], PROMPT)
    turn = [*PROMPT, *answer, 500, 501]
    warm, _ = found(server, KEYS[0], turn)
    assert (cold, warm) == (0, (len(PROMPT) + len(answer) - 1) // BLOCK * BLOCK)
    assert warm > FULL


def test_two_keys_never_share(server: InProcess):
    assert [found(server, key, PROMPT)[0] for key in KEYS] == [0, 0]
    assert found(server, KEYS[1], PROMPT)[0] > 0


@pytest.mark.parametrize("server", [{"share_prefix_cache": True}], indirect=True)
def test_two_keys_share_where_they_may(server: InProcess):
    assert found(server, KEYS[0], PROMPT)[0] == 0
    assert found(server, KEYS[1], PROMPT)[0] >= FULL
    assert found(server, KEYS[1], PROMPT, cache_salt="mine")[0] == 0


def test_a_salt_keeps_apart_within_a_key(server: InProcess):
    for salt in ("one", "two"):
        assert found(server, KEYS[0], PROMPT, cache_salt=salt)[0] == 0
        assert found(server, KEYS[0], PROMPT, cache_salt=salt)[0] >= FULL
    assert found(server, KEYS[1], PROMPT, cache_salt="one")[0] == 0
    assert found(server, KEYS[0], PROMPT)[0] == 0


@pytest.mark.parametrize("salt", ["", "a" * 257])
def test_a_salt_has_1_to_256_characters(server: InProcess, salt: str):
    with pytest.raises(openai.BadRequestError) as refused:
        found(server, KEYS[0], PROMPT, cache_salt=salt)
    assert refused.value.param == "cache_salt"


def test_chat_responses_and_messages_tell_what_was_found(server: InProcess):
    """Each in its dialect's words; what one computed the others find: the prompt is the same."""
    text = "Tell me of the sea, the mountains, the weather and the stars, slowly. " * 3
    said = [{"role": "user", "content": text}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0]) as client:
        chats = [client.chat.completions.create(model="tiny", messages=said) for _ in range(2)]
        cold, warm = (chat.usage.prompt_tokens_details.cached_tokens for chat in chats)
        num_prompt = chats[0].usage.prompt_tokens
        assert cold == 0 and warm in (num_prompt - 1, num_prompt // BLOCK * BLOCK)
        usage = client.responses.create(model="tiny", input=text, max_output_tokens=4).usage
        assert usage.input_tokens_details.cached_tokens == warm
    with anthropic.Anthropic(base_url=server.url, api_key=KEYS[0]) as client:
        usage = client.messages.create(model="tiny", messages=said, max_tokens=4).usage
    assert usage.cache_read_input_tokens == warm
    assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt
