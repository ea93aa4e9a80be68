"""What is not served says so: which methods a path takes, which calls are of other servers."""

import urllib.error
import urllib.request
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from live_server import LiveServer


def allowed(server: LiveServer, path: str) -> set[str]:
    """The methods that the answer to a wrong one names."""
    request = urllib.request.Request(server.url + path, method="PATCH")
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request):
        pass
    with caught.value as answer:
        assert answer.code == 405, path
        return set(answer.headers["allow"].split(", "))


def test_a_method_that_a_path_does_not_take_is_told_which_it_takes(server: LiveServer) -> None:
    document: dict[str, Any] = msgspec.json.decode(server.get("/openapi.json")[1])
    for path, operations in document["paths"].items():
        wanted = {method.upper() for method in operations}
        assert wanted <= allowed(server, path.replace("{", "").replace("}", "")), path
    assert allowed(server, "/v1/files") == {"GET", "HEAD", "POST"}
    assert allowed(server, "/v1/responses/resp_x") == {"DELETE", "GET", "HEAD"}


UNSERVED = [
    lambda client: client.responses.compact(model="tiny", input="x"),
    lambda client: client.conversations.create(),
    lambda client: client.embeddings.create(model="tiny", input="x"),
    lambda client: client.moderations.create(input="x"),
    lambda client: client.fine_tuning.jobs.list(),
    lambda client: client.vector_stores.create(),
    lambda client: client.audio.speech.create(model="tiny", input="x", voice="alloy"),
    lambda client: client.images.generate(prompt="x"),
]


@pytest.mark.parametrize("call", UNSERVED)
def test_a_call_that_is_not_served_is_a_404_that_says_what_it_is(
    client: openai.OpenAI, call: Any
) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here") as caught:
        call(client)
    assert caught.value.code == "unsupported_endpoint"


def test_an_unknown_path_has_the_same_words(server: LiveServer) -> None:
    messages = {
        server.post(path, {})[1]["error"]["message"].replace(path, "PATH")
        for path in ("/nowhere", "/v1/nowhere", "/v1/responses/a/b")
    }
    assert messages == {"PATH is not served here."}


def test_anthropics_client_has_its_own_errors_at_shared_paths(server: LiveServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        assert claude.models.retrieve("tiny").id == "tiny"
        for call in (
            lambda: claude.models.retrieve("gone"),
            lambda: claude.post("/v1/complete", cast_to=object, body={}),
        ):
            with pytest.raises(anthropic.NotFoundError) as caught:
                call()
            body: Any = caught.value.body
            assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
            assert caught.value.request_id == body["request_id"]


def test_no_usage_is_no_usage_in_any_chunk(client: openai.OpenAI) -> None:
    for wanted, shown in ((False, False), (True, True), (None, True)):
        options: Any = {"continuous_usage_stats": True, "include_usage": wanted}
        asked: Any = {"model": "tiny", "max_tokens": 3, "stream": True, "stream_options": options}
        for chunks in (
            client.completions.create(prompt="x", **asked),
            client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **asked),
        ):
            assert any(chunk.usage is not None for chunk in chunks) == shown


def test_the_size_of_the_cache_is_in_its_info(server: LiveServer) -> None:
    """vLLM's labels: the tokens that fit, and how many whole contexts these are."""
    text = server.get("/metrics")[1].decode()
    (line,) = [line for line in text.splitlines() if "cache_config_info{" in line]
    labels = dict(
        part.split("=", 1) for part in line.partition("{")[2].partition("}")[0].split(",")
    )
    tokens = int(labels["kv_cache_size_tokens"].strip('"'))
    card = msgspec.json.decode(server.get("/v1/models")[1])["data"][0]
    assert tokens == int(labels["num_gpu_blocks"].strip('"')) * int(labels["block_size"].strip('"'))
    concurrency = float(labels["kv_cache_max_concurrency"].strip('"'))
    assert concurrency == pytest.approx(tokens / card["max_model_len"], abs=0.01)
