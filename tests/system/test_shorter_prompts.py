"""`context` served: by the draft of the embedded model, in every dialect, and through a gateway."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_gateway import LiveGateway
from live_server import LiveServer, headway

CLASSES = "cheap: {keep_context: 0.4}\n"
STORY = (
    "Once upon a time there was a fox. The fox was happy. Anna has a red kite. The fox went home. "
    "The sun was warm. They all laughed. The end."
)
ASKED = "What colour is the kite of Anna? Answer from the text."
DOCUMENT = {"type": "document", "document": {"data": STORY}}
CHAT = [{"role": "user", "content": [DOCUMENT, {"type": "text", "text": ASKED}]}]
KEEP = {"context": {"keep": 0.4}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    classes = tmp_path_factory.mktemp("classes") / "classes.yaml"
    classes.write_text(CLASSES)
    live = LiveServer(None, "--kv-memory=64MiB", f"--classes={classes}").wait_ready()
    yield live
    live.close()


def ask(live: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": CHAT, "max_tokens": 12, "temperature": 0, **fields}
    status, answer = live.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def cut_of(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"].get("cut_tokens", -1)


def test_less_is_read_and_the_answer_stands(served):
    whole, short = ask(served), ask(served, **KEEP)
    assert cut_of(whole) == -1
    assert cut_of(short) == whole["usage"]["prompt_tokens"] - short["usage"]["prompt_tokens"] > 20
    assert short["choices"][0]["message"]["content"] == "Red."


def test_what_stays_is_what_surprises_and_what_is_asked_for(served):
    status, found = served.post("/apply-template", {"messages": CHAT, **KEEP})
    assert status == 200
    assert "Anna has a red kite." in found["prompt"] and ASKED in found["prompt"]
    assert "The fox was happy. The fox went home." not in found["prompt"]
    assert served.post("/apply-template", {"messages": CHAT, **KEEP})[1] == found
    counts = [
        served.post("/tokenize", {"messages": CHAT, **more})[1]["count"] for more in ({}, KEEP)
    ]
    assert counts[0] - counts[1] == cut_of(ask(served, **KEEP))


def test_the_same_cut_is_found_in_the_prefix_cache(served):
    parts = [{"type": "document", "document": {"data": STORY * 3}}, *CHAT[0]["content"][1:]]
    turns = [{"role": "user", "content": parts}]
    first = ask(served, messages=turns, **KEEP)
    said = first["choices"][0]["message"]
    turns += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "So?"}]
    second = ask(served, messages=turns, **KEEP)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] // 16 * 16 > 0
    assert cut_of(second) == cut_of(first)


def test_a_class_says_it_and_a_request_takes_it_back(served):
    assert cut_of(ask(served, service_class="cheap")) > 20
    assert cut_of(ask(served, service_class="cheap", context={"keep": 1})) == -1


def test_each_dialect_cuts_and_tells(served):
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": STORY}
    items = [{"role": "user", "content": ASKED}, call, output]
    body = {"input": items, "max_output_tokens": 8, "temperature": 0, **KEEP}
    status, answer = served.post("/v1/responses", body)
    assert status == 200 and answer["usage"]["input_tokens_details"]["cut_tokens"] > 20, answer
    status, counted = served.post("/v1/responses/input_tokens", {"input": items, **KEEP})
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    source = {"type": "text", "media_type": "text/plain", "data": STORY}
    content = [{"type": "document", "source": source}, {"type": "text", "text": ASKED}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **KEEP}
    status, answer = served.post("/v1/messages", {**body, "temperature": 0})
    assert status == 200 and answer["usage"]["cut_input_tokens"] > 20, answer
    assert answer["content"][0]["text"] == "Red."
    counted = served.post("/v1/messages/count_tokens", {"messages": body["messages"], **KEEP})[1]
    assert counted["input_tokens"] == sum(
        answer["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": CHAT, "context": {"keep": 7}}, "context.keep"),
        ("chat/completions", {"messages": CHAT, "context": {"kept": 1}}, "context.kept"),
        ("chat/completions", {"messages": CHAT, "context": [0.5]}, "context"),
        ("responses", {"input": "Hi", "context": {"keep": "half"}}, "context.keep"),
        ("completions", {"prompt": "Hi", "context": {"keep": 0.5}}, "context"),
        ("../tokenize", {"prompt": "Hi", "context": {"keep": 0.5}}, "context"),
    ],
)
def test_bad_values_are_refused_by_name(served, path, body, param):
    status, answer = served.post(f"/v1/{path}".replace("/v1/../", "/"), body)
    assert status == 400 and answer["error"]["param"] == param, answer


async def test_streams_and_a_gateway_pass_it_through(served):
    gateway = LiveGateway(served.url)
    try:
        body = {"model": served.model, "messages": CHAT, "max_tokens": 8, "temperature": 0}
        body |= {**KEEP, "stream": True, "stream_options": {"include_usage": True}}
        told = []
        for url in (served.url, gateway.url):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/v1/chat/completions", json=body) as answer,
            ):
                lines = (await answer.text()).split("\n\n")
                told.append(answer.headers["x-headway-context"])
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            usage = [event["usage"] for event in events if event.get("usage")][-1]
            assert usage["prompt_tokens_details"]["cut_tokens"] > 20
        assert told[0] == told[1] and told[0].startswith("keep=0.4:surprisal, cut=")
    finally:
        gateway.close()


def test_lines_of_a_batch_are_cut_too(served, tmp_path: Path):
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
        | {"body": {"model": served.model, "messages": CHAT, "max_tokens": 4, **more}}
        for name, more in (("whole", {}), ("short", KEEP))
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = headway("batch", "headway-tiny", source, f"--output={target}", "--kv-memory=64MiB")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    by_id = {line["custom_id"]: line["response"]["body"] for line in answers}
    assert cut_of(by_id["short"]) > 20 and cut_of(by_id["whole"]) == -1


def test_without_a_draft_it_is_refused_and_chance_is_not(start_server, tmp_path: Path):
    live = start_server("--served-model-name=tiny").wait_ready()
    status, answer = live.post("/v1/chat/completions", {"messages": CHAT, **KEEP})
    assert status == 400 and answer["error"]["code"] == "no_draft_model", answer
    assert "--draft-model" in answer["error"]["message"]
    chance = {"context": {"keep": 0.4, "method": "random"}}
    assert cut_of(ask(live, **chance)) > 20
    classes = tmp_path / "classes.yaml"
    classes.write_text(CLASSES)
    refused = start_server(f"--classes={classes}")
    assert refused.wait_end() == 2 and "keep_context" in refused.stderr


def test_eval_sets_cuts_beside_chance(served, tmp_path: Path):
    report = tmp_path / "report.json"
    few = ("--suite=context", "--questions=1", "--levels=1", "--concurrency=2")
    done = headway("eval", served.url, *few, f"--json={report}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| surprisal |") == done.stdout.count("| random |") == 3
    columns = json.loads(report.read_text())["columns"]
    assert all(len(column["right"]) == 3 for column in columns)
    gated = headway("eval", served.url, *few, "--gate", "--skills=lookup")
    assert gated.returncode == 5, "one question proves nothing"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("headway-tiny",), "--suite context asks a server"),
        (("http://127.0.0.1:9", "--against=x"), "takes no --against"),
        (("http://127.0.0.1:9", "--skills=sort"), "sort has no document"),
    ],
)
def test_eval_refuses_what_has_no_documents(arguments: tuple[str, ...], word: str):
    done = headway("eval", *arguments, "--suite=context")
    assert done.returncode == 2 and word in done.stderr, done.stderr
