"""Every dialect says the same whether tokens come one at a time or in bursts of guesses.

Two servers of the embedded model, one of which guesses by every source: the same bodies, streamed
and whole, with stop strings, log-probabilities, tools, schemas and several choices. The machine of
the second is said to be one where guesses always pay, so that they are made however fast it is.
"""

import concurrent.futures
import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from drive import engine_for
from headway.advise.diagnosis import diagnose
from headway.advise.from_stats import reading_from_stats
from headway.bench.page import as_text
from headway.bench.trial import run_once
from headway.config.options.bench import BenchOptions
from headway.core.request import SamplingParams
from headway.engine.engine import Engine
from headway.engine.speculation import make_speculator
from headway.evals.skills.suite import examples
from headway.llm import LLM
from headway.perf.model import Prior, StepModel
from headway.server.models import answer_formats
from headway.spec.embedded import model_folder
from headway.telemetry.snapshot import Snapshot
from in_process import InProcess, fake_state

GUESSES_PAY = Prior(
    weights_s=1e-3, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, attended_s=1e-12, read_s=1e-9
)
"""A step takes a millisecond whatever it does: within what any objective bears."""
COPY = "Repeat: the red fox ran over the hill and the red fox ran over the hill and back again."
STORY = "Tell me a story about a dog."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
UNLIKE = (
    *("id", "created", "created_at", "completed_at", "call_id", "item_id"),
    *("system_fingerprint", "timings", "obfuscation"),
)
"""Fields that differ from answer to answer."""
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 11}


def always_pays(engine: Engine) -> None:
    """Have it guess as on a machine where that pays."""
    speculator = make_speculator(engine.settings.speculation, StepModel(GUESSES_PAY))
    engine.scheduler.drafts.speculator = speculator


def server(folder: Path, **options: Any) -> Iterator[InProcess]:
    engine = engine_for(model_folder(None), max_model_len=512, prefix_cache=False, **options)
    if options:
        always_pays(engine)
    state = fake_state(engine, data_dir=str(folder / "data"))
    (row,) = state.rows
    row.format, row.reasoning = answer_formats(row.tokenizer, "auto")
    live = InProcess(folder / "data", state)
    try:
        yield live
    finally:
        live.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A server without speculation."""
    yield from server(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """One that guesses from prompts, past answers and by the smaller model."""
    folder = tmp_path_factory.mktemp("guessing")
    yield from server(folder, speculative_method="auto", draft_model="headway-draft")


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def tool_question() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages, tools) of a question that the model answers with a call."""
    example = next(itertools.islice(examples("tool", 1, seed=1), 1))
    lines = example.system.splitlines()
    tools = [json.loads(line) for line in lines if line.startswith('{"type"')]
    return [{"role": "user", "content": example.prompt}], tools


def chat_bodies() -> Iterator[dict[str, Any]]:
    messages, tools = tool_question()
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    yield asked(COPY, max_tokens=60, **GREEDY)
    yield asked(
        STORY, max_tokens=80, logprobs=True, top_logprobs=2, return_token_ids=True, **GREEDY
    )
    yield asked(STORY, max_tokens=60, n=3, logprobs=True, **SEEDED)
    yield asked(STORY, max_tokens=60, stop=["dog", ". "], **GREEDY)
    yield asked(STORY, max_tokens=60, response_format=schema, **SEEDED)
    yield asked(STORY, max_tokens=40, frequency_penalty=0.5, min_tokens=30, **SEEDED)
    yield {"model": "tiny", "messages": messages, "tools": tools, "max_tokens": 80, **GREEDY}


def completion_bodies() -> Iterator[dict[str, Any]]:
    prompt = "Once upon a time there was a dog. Once upon a time there was a"
    first = {"model": "tiny", "prompt": prompt, "max_tokens": 60}
    yield {**first, **GREEDY, "logprobs": 2, "return_token_ids": True}
    yield {**first, **GREEDY, "stop": [" the", "was"], "logprobs": 1}
    yield {**first, **SEEDED, "stop": ["e"], "include_stop_str_in_output": True, "n": 2}
    yield {**first, **SEEDED, "n": 2, "echo": True, "ignore_eos": True}
    yield {**first, **GREEDY, "prompt": [prompt, STORY, COPY], "logprobs": 0}


def response_bodies() -> Iterator[dict[str, Any]]:
    messages, tools = tool_question()
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    first = {"model": "tiny", "input": STORY, "max_output_tokens": 60, "store": False}
    yield {**first, **logprobs, **GREEDY}
    yield {**first, **SEEDED, "text": text}
    yield {**first, **GREEDY, "input": messages, "tools": flat}


def message_bodies() -> Iterator[dict[str, Any]]:
    messages, tools = tool_question()
    named = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in tools
    ]
    yield asked(COPY, max_tokens=60, **GREEDY)
    yield asked(STORY, max_tokens=60, stop_sequences=["dog"], **GREEDY)
    yield {"model": "tiny", "messages": messages, "tools": named, "max_tokens": 80, **GREEDY}


BODIES = {
    "/v1/chat/completions": chat_bodies,
    "/v1/completions": completion_bodies,
    "/v1/responses": response_bodies,
    "/v1/messages": message_bodies,
}


def alike(found: Any) -> Any:
    """Without what differs from answer to answer."""
    if isinstance(found, dict):
        return {name: alike(each) for name, each in found.items() if name not in UNLIKE}
    return [alike(each) for each in found] if isinstance(found, list) else found


def joined(found: Any, more: Any) -> Any:
    """What two chunks say together: texts and lists one behind the other, objects by name."""
    if isinstance(found, dict) and isinstance(more, dict):
        names = [name for name in more if name != "type"]
        both = {"type": more.get("type"), **{n: joined(found.get(n), more[n]) for n in names}}
        return {**found, **both}
    if found is None or more is None:
        return found if more is None else more
    if isinstance(found, str) and isinstance(more, str):
        return found + more
    if isinstance(found, list) and isinstance(more, list):
        return found + more
    return more


def added(chunks: list[dict[str, Any]]) -> dict[tuple[Any, ...], Any]:
    """What the chunks of OpenAI's streams add up to: by choice, and by tool call of it."""
    found: dict[tuple[Any, ...], Any] = {}
    for chunk in chunks:
        for choice in chunk.pop("choices", []):
            delta = choice.get("delta", {})
            for call in delta.pop("tool_calls", None) or []:
                place = choice["index"], call.pop("index")
                found[place] = joined(found.get(place, {}), call)
            delta.pop("role", None)
            place = (choice.pop("index"),)
            found[place] = joined(found.get(place, {}), choice)
        usage = chunk.get("usage")
        if usage:
            found["usage",] = usage
    return found


def told(events: list[dict[str, Any]]) -> dict[Any, Any]:
    """What events of the other two dialects add up to: deltas by place, else the last of a type."""
    found: dict[Any, Any] = {}
    for event in events:
        kind, number = event["type"], event.pop("sequence_number", 0)
        assert number >= 0
        place = kind, event.get("output_index", event.get("index"))
        if kind.endswith("delta"):
            found[place] = joined(found.get(place, {}), {**event, "type": None})
        elif kind != "ping":
            found[place] = event
    return found


def fetch(live: InProcess, path: str, body: dict[str, Any] | None = None) -> str:
    """The text of an answer with status 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        live.url + path, data=data, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{path} {body}: {error.read().decode()}") from None


def stream(live: InProcess, path: str, body: dict[str, Any]) -> Any:
    """What a stream adds up to."""
    extra = {} if path == "/v1/messages" else {"stream_options": {"include_usage": True}}
    extra = {} if path == "/v1/responses" else extra
    text = fetch(live, path, {**body, "stream": True, **extra})
    lines = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    chunks = [alike(json.loads(line)) for line in lines if line != "[DONE]"]
    return added(chunks) if path.endswith("completions") else told(chunks)


def whole(live: InProcess, path: str, body: dict[str, Any]) -> Any:
    return alike(json.loads(fetch(live, path, body)))


def answers(live: InProcess, path: str) -> list[Any]:
    """All bodies of a dialect, whole and streamed, four at a time."""
    calls = [(way, body) for body in BODIES[path]() for way in (whole, stream)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda call: call[0](live, path, call[1]), calls))


def counters(live: InProcess) -> dict[str, float]:
    text = fetch(live, "/metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("headway:")
            if name.endswith("_bucket"):
                name += f"[{sample.labels['le']}]"
            found[name] = found.get(name, 0.0) + sample.value
    return found


@pytest.mark.parametrize("path", BODIES)
def test_answers_are_the_same(plain: InProcess, guessing: InProcess, path: str) -> None:
    """Text, calls, usage, reasons, log-probabilities; twice, for the second time it is known."""
    expected = answers(plain, path)
    before = counters(guessing)
    for _ in range(2):
        for found, right in zip(answers(guessing, path), expected, strict=True):
            assert found == right
    after = counters(guessing)
    kept = "spec_decode_num_accepted_tokens_total"
    assert after[kept] - before[kept] > 50
    told = json.loads(fetch(guessing, "/stats"))["windows"][2]["drafts"]
    assert set(told["by_source"]) == {"lookup", "suffixes", "forced", "draft"}
    assert told["tokens_per_step"] > 1 and told["acceptance"] > 0


def test_a_burst_is_one_gap_and_then_none(guessing: InProcess) -> None:
    """By the client's chunks and by the server's histogram: as many gaps, as many of them 0."""
    body = {"model": "tiny", "prompt": COPY, "max_tokens": 80, "ignore_eos": True, **GREEDY}
    before = counters(guessing)
    asked_for = {**body, "stream": True, "return_token_ids": True, "timings": True}
    lines = fetch(guessing, "/v1/completions", asked_for).split("\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    timings = next(chunk["timings"] for chunk in chunks if "timings" in chunk)
    sizes = [len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"]]
    gained = {name: value - before.get(name, 0) for name, value in counters(guessing).items()}
    assert sum(sizes) == 80 and len(sizes) < 60, "tokens come in bursts"
    itl = "inter_token_latency_seconds"
    assert gained[f"{itl}_count"] == sum(sizes) - 1
    assert gained[f"{itl}_bucket[0.001]"] >= sum(size - 1 for size in sizes if size)
    assert timings["draft_n"] >= timings["draft_n_accepted"] == 80 - sum(map(bool, sizes))
    assert gained["spec_decode_num_accepted_tokens_total"] == timings["draft_n_accepted"]
    assert timings["tpot_s"] * 79 == pytest.approx(timings["e2e_s"] - timings["ttft_s"])


async def test_the_load_generator_and_the_server_agree(guessing: InProcess) -> None:
    """Both count a gap for each token but the first, and of a burst all but one are 0.

    The load generator asks a few things before, to see what the server can do.
    """
    before = counters(guessing)
    given = {"concurrency": 2, "num_requests": 6, "warmup": 0.0}
    given |= {"cooldown": 0.0, "input_len": "40", "output_len": "60", "temperature": 0.0}
    report = await run_once(guessing.url, BenchOptions(**given), "test", None)
    gained = {name: value - before.get(name, 0) for name, value in counters(guessing).items()}
    itl, name = report.figures.itl_s, "inter_token_latency_seconds"
    assert itl is not None and itl.count == 6 * 59
    assert re.search(r"draft tokens accepted \d+\.\d%, acceptance length \d\.\d\d", as_text(report))
    tokens = gained["generation_tokens_total"] - 6 * 60
    assert gained[f"{name}_count"] - itl.count == tokens - (gained["request_success_total"] - 6)
    zeros = sum(sum(x.chunk_tokens) - len(x.chunk_tokens) for x in report.run.exchanges)
    kept = gained["spec_decode_num_accepted_tokens_total"]
    assert 0 < zeros <= kept <= zeros + tokens and gained[f"{name}_bucket[0.001]"] >= kept


def test_the_doctor_tells_what_it_brings(plain: InProcess, guessing: InProcess) -> None:
    """Measured where tokens are guessed, and nothing where they are not."""
    found = {}
    for live in (plain, guessing):
        polls = [msgspec.json.decode(fetch(live, "/stats"), type=Snapshot)] * 2
        found[live] = diagnose(reading_from_stats(live.url, polls, seconds=300))
    assert found[plain].drafts == []
    forced, kept, price = found[guessing].drafts
    assert re.match(r"grammars forced \d+ tokens, neither drafted nor sampled$", forced)
    assert re.match(
        r"\d+% of \d.* draft tokens a step accepted \(.*lookup \d+%.*\): \d\.\d\d tokens", kept
    )
    assert re.search(r"take \d+% of the time in steps: \d\.\d\d times the tokens/s", price)
    assert "drafts" not in {each.name for each in found[guessing].findings}


def test_offline_answers_are_the_same_too() -> None:
    """`LLM` with a stop string in the middle of what is guessed, log-probabilities and siblings."""
    told = []
    draft = {
        "speculative_method": "auto",
        "draft_model": "headway-draft",
        "num_speculative_tokens": 6,
    }
    for options in ({}, draft, {"speculative_method": "auto"}):
        llm = LLM(model_folder(None), max_model_len=512, kv_memory="32MiB", **options)
        if options:
            always_pays(llm.engine)
        sampling = [
            SamplingParams(temperature=0, max_tokens=60, stop=[" the"], logprobs=1),
            SamplingParams(temperature=1, seed=3, max_tokens=40, n=2),
        ]
        for _ in range(2):
            found = llm.generate([STORY, COPY], sampling)
            told.append([(o.text, o.token_ids, o.logprobs) for each in found for o in each.outputs])
        assert bool(options) == (llm.engine.scheduler.drafts.speculator is not None)
        if options:
            counts = llm.engine.scheduler.drafts.speculator.counts
            assert {"draft_model" in options, "medusa" in counts} == {True, False}
            assert sum(kept for _, kept in counts.values()) > 20
    assert all(each == told[0] for each in told)
