"""What a client sees when upstreams fail: the whole answer, or an error; never silence."""

import asyncio
import random
import time
from math import inf

import pytest

from gateway_world import TOO_LONG, Answer, Stub, text_of, world
from headway.core.clock import SystemClock
from headway.gateway.breaker import RetryBudget
from headway.gateway.dialects import DIALECTS
from headway.gateway.stream import StreamedAnswer
from headway.gateway.timeouts import FirstTokenTimeout, SilenceTimeout

TURNS = ({"name": "tiny", "policy": "round_robin"},)


@pytest.mark.parametrize(
    "fault",
    [
        *("status503", "status502", "status429", "status401", "status201", "status204"),
        *("lie", "close", "error_event", "stall"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_another_upstream_answers_before_anything_was_sent(fault: str, stream: bool) -> None:
    models = ({**TURNS[0], "first_token": "2s" if fault == "stall" else "60s"},)
    if fault == "stall" and not stream:
        pytest.skip("a whole answer may take as long as its deadline")
    if fault == "error_event" and not stream:
        pytest.skip("an event is of a stream")
    bad = Stub("a", fault=lambda number: fault)
    async with world(bad, Stub("b"), models=models) as live:
        answers = [await live.chat(stream) for _ in range(2)]
    assert [answer.text for answer in answers] == [text_of(8)] * 2
    assert len(bad.asked) == 1
    assert sorted(answer.headers["x-headway-attempts"] for answer in answers) == ["1", "2"]


@pytest.mark.parametrize("headway", [True, False])
async def test_a_stream_that_breaks_goes_on_or_ends_with_an_error(headway: bool) -> None:
    bad = Stub("a", headway=headway, fault=lambda number: f"reset{number % 8}")
    async with world(bad, Stub("b", headway=headway), models=TURNS) as live:
        answers = [await live.chat() for _ in range(12)]
        assert live.state.metrics.of("resumed", how="exact") == (5 if headway else 0)
    whole = [answer for answer in answers if answer.is_complete]
    if headway:
        assert len(whole) == 12
        return
    for answer in answers:  # those that broke after their first token
        if answer not in whole:
            assert answer.data.count(b'data: {"error"') == 1 and b"DONE" not in answer.data
    assert 0 < len(whole) < 12


@pytest.mark.parametrize("fault", ["unmarked_end", "unmarked_end_reset"])
async def test_an_end_without_its_mark_is_not_the_end(fault: str) -> None:
    """The last token has come and its mark has not: another upstream sends it again."""
    bad = Stub("a", headway=True, fault=lambda number: fault)
    async with world(bad, Stub("b", headway=True), models=TURNS) as live:
        answer = await live.chat()
        assert live.state.metrics.of("resumed", how="exact") == 1
    assert answer.is_complete and answer.text == text_of(8)


@pytest.mark.parametrize("headway", [True, False])
async def test_what_a_broken_upstream_opened_is_not_shown(headway: bool) -> None:
    """It broke behind its first event, which shows no token: the client sees the other's alone."""
    bad = Stub("a", headway=headway, fault=lambda number: "reset0")
    async with world(bad, Stub("b", headway=headway), models=TURNS) as live:
        answer = await live.chat()
    assert answer.is_complete and answer.text == text_of(8)
    roles = [chunk for chunk in answer.chunks if chunk["choices"][0]["delta"].get("role")]
    assert len(roles) == 1 and roles[0]["id"].startswith("chatcmpl-b-")
    assert {chunk["id"] for chunk in answer.chunks} == {roles[0]["id"]}


TOOLS = [{"type": "function", "function": {"name": "note"}}]


@pytest.mark.parametrize("fault", ["", "reset3"])
async def test_streamed_calls_of_tools_pass_and_go_on(fault: str) -> None:
    bad = Stub("a", headway=True, fault=lambda number: fault)
    async with world(bad, Stub("b", headway=True), models=TURNS) as live:
        answer = await live.chat(tools=TOOLS)
        assert live.state.metrics.of("resumed", how="exact") == bool(fault)
    assert answer.status == 200 and answer.data.endswith(b"data: [DONE]\n\n"), answer.data
    deltas = [chunk["choices"][0]["delta"] for chunk in answer.chunks if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == text_of(8)


@pytest.mark.parametrize(
    ("prompt", "may"),
    [
        *[("a", True), ([1, 2], True), ([[1, 2]], True), (["a"], True)],
        *[(["a", "b"], False), ([[1], [2]], False)],
    ],
)
def test_one_prompt_goes_on_however_it_is_written(prompt: object, may: bool) -> None:
    completions = DIALECTS["/v1/completions"]
    assert completions.may_resume({"prompt": prompt}) is may
    assert not completions.may_resume({"prompt": prompt, "n": 2})


async def test_a_stream_goes_on_as_text_where_the_route_says_so() -> None:
    route = {**TURNS[0], "resume": "text"}
    bad, good = Stub("a", fault=lambda number: "reset3"), Stub("b")
    async with world(bad, good, models=(route,)) as live:
        answer = await live.chat()
    sent = good.asked[0]
    assert sent["messages"][-1] == {"role": "assistant", "content": "t0 t1 t2 "}
    assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
    assert answer.text == "t0 t1 t2 " + text_of(8)  # the stub begins again; a server would not
    assert {chunk["id"] for chunk in answer.chunks} == {answer.chunks[0]["id"]}
    assert answer.chunks[-1]["headway"] == {"resumed": "text"}


async def test_what_came_with_the_end_is_enough() -> None:
    """A stream without [DONE] that has said how it finished is complete, with its usage."""
    for headway in (True, False):
        stub = Stub("a", headway=headway, fault=lambda number: "no_end")
        async with world(stub) as live:
            answer = await live.chat(stream_options={"include_usage": True})
        assert answer.is_complete
        assert answer.chunks[-1]["usage"]["completion_tokens"] == (8 if headway else 6)


async def test_a_client_error_is_told_and_not_repeated() -> None:
    bad, good = Stub("a", fault=lambda number: "status422"), Stub("b")
    async with world(bad, good, models=TURNS) as live:
        answers = [await live.chat() for _ in range(8)]
        assert live.state.upstreams["a"].breaker.state == "closed"
    refused = [answer for answer in answers if answer.status == 422]
    assert len(refused) == 4 == len(bad.asked)
    error = refused[0].json["error"]
    assert (error["code"], error["param"]) == ("some_code", "x")
    assert b"10.0.0.1" not in refused[0].data, "an upstream's text may say what nobody must know"


@pytest.mark.parametrize("fault", TOO_LONG)
async def test_a_prompt_that_is_too_long_there_goes_where_there_is_room(fault: str) -> None:
    small = Stub("a", fault=lambda number: fault)
    async with world(small, Stub("b"), models=TURNS) as live:
        assert [(await live.chat()).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_all_refuse_is_asked_of_each_once(stream: bool) -> None:
    """A refusal says the same the second time: nobody is asked twice, and the budget stays."""
    stubs = [Stub(name, fault=lambda number: "too_long_vllm") for name in "ab"]
    async with world(*stubs, models=TURNS) as live:
        async with asyncio.timeout(5.0):
            answers = [await live.chat(stream) for _ in range(4)]
        assert {answer.status for answer in answers} == {400}
        assert {answer.json["error"]["code"] for answer in answers} == {"context_length_exceeded"}
        assert [len(stub.asked) for stub in stubs] == [4, 4]


async def test_what_nobody_understands_is_refused_by_the_name_of_its_field() -> None:
    stub = Stub("a", headway=True)
    async with world(stub) as live:
        picture = {"type": "image_url", "image_url": {"url": "x"}}
        messages = [{"role": "user", "content": [picture]}]
        answer = await live.chat(messages=messages)
        error = answer.json["error"]
        assert (answer.status, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == "messages" and "understands images" in error["message"]
        assert stub.asked == []


async def test_with_everything_down_refusals_are_quick_and_few() -> None:
    stubs = [Stub("a"), Stub("b")]
    async with world(*stubs, models=TURNS) as live:
        for stub in stubs:
            await stub.stop()
        answers = await asyncio.gather(*(live.chat() for _ in range(60)))
        assert {answer.status for answer in answers} <= {502, 503}
        attempts = live.state.metrics.of("attempts")
        assert attempts <= 60 * 1.1 + 3, attempts
        for stub in stubs:
            await stub.start()
        while any(up.breaker.state == "open" or up.is_down for up in live.state.upstreams.values()):
            await asyncio.sleep(0.05)
        assert (await live.chat()).is_complete


async def test_a_retry_waits_for_the_budget_where_an_upstream_stands_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven of eight first attempts fail at once; the budget holds four, and more soon."""
    monkeypatch.setattr("headway.gateway.breaker.WINDOW_S", 0.3)
    stubs = [
        Stub(name, fault=lambda number, bad=bad: "status503" if number <= bad else "")
        for name, bad in (("a", 4), ("b", 3))
    ]
    async with world(*stubs, models=TURNS) as live:
        answers = await asyncio.gather(*(live.chat(stream) for stream in [True, False] * 4))
        assert not live.state.metrics.of("retries_denied")
        assert live.state.metrics.of("attempts") == 8 + 7
    assert [answer.text for answer in answers] == [text_of(8)] * 8


async def test_a_model_whose_only_upstream_fails_costs_no_attempt_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its breaker opens although it is alone: the fallback is asked first until it rests."""
    for name, value in {"WINDOW_S": 0.3, "OPEN_S": 600.0, "MAX_OPEN_S": 600.0}.items():
        monkeypatch.setattr(f"headway.gateway.breaker.{name}", value)
    monkeypatch.setattr("headway.gateway.upstream.HEALTH_CHECK_S", 600.0)
    bad, good = Stub("a", fault=lambda number: "status503"), Stub("b")
    models = (
        {"name": "tiny", "upstreams": ["a"], "fallbacks": ["big"]},
        {"name": "big", "upstreams": ["b"]},
    )
    async with world(bad, good, models=models) as live:
        answers = [await live.chat(stream) for stream in [True, False] * 10]
    assert [answer.text for answer in answers] == [text_of(8)] * 20
    assert len(bad.asked) == 5


async def test_fallbacks_are_not_asked_over_and_over() -> None:
    """Where all fail a request ends after two rounds, whatever the fallbacks of fallbacks are."""
    stubs = [Stub(name, fault=lambda number: "status503") for name in "abc"]
    models = (
        {"name": "tiny", "upstreams": ["a"], "fallbacks": ["two", "three"]},
        {"name": "two", "upstreams": ["b"], "fallbacks": ["three"]},
        {"name": "three", "upstreams": ["c"]},
    )
    async with world(*stubs, models=models) as live:
        live.state.budget = RetryBudget(SystemClock(), share=0.0, least=100)
        answer = await live.chat()
    assert answer.status == 503
    assert [len(stub.asked) for stub in stubs] == [2, 2, 2]


async def test_a_redirect_is_not_followed() -> None:
    """URLs come from the configuration alone, whatever an upstream says."""
    bad, good = Stub("a", fault=lambda number: "redirect"), Stub("b")
    async with world(bad, good, models=TURNS) as live:
        bad.elsewhere = good.url + "/chat/completions"
        answers = [await live.chat(stream) for stream in (True, False)]
        assert live.state.metrics.of("attempts", upstream="a", outcome="lied") == 1
    assert [answer.text for answer in answers] == [text_of(8)] * 2
    assert (len(bad.asked), len(good.asked)) == (1, 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_has_no_end_is_cut(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.gateway.stream.MAX_STREAM_BYTES", 1000)
    monkeypatch.setattr("headway.gateway.whole.MAX_WHOLE_BYTES", 1000)
    async with world(Stub("a")) as live:
        answer = await live.chat(stream, max_tokens=2000)
        assert live.state.metrics.of("attempts", outcome="lied") >= 1
    assert b'"lied"' in answer.data and (b"DONE" not in answer.data)


async def test_a_busy_upstream_is_told_at_once() -> None:
    """429 everywhere: waiting for a second try would only add to what is too much."""
    stubs = [Stub(name, fault=lambda number: "status429") for name in "ab"]
    async with world(*stubs, models=TURNS) as live:
        live.state.budget = RetryBudget(SystemClock(), share=0.0, least=0)
        answer = await asyncio.wait_for(live.chat(), 5.0)
    assert answer.json["error"]["code"] == "overloaded"
    assert sum(len(stub.asked) for stub in stubs) == 1


async def test_a_late_first_token_is_waited_for_while_no_other_may_be_asked() -> None:
    late, other = Stub("a", fault=lambda number: "late"), Stub("b")
    async with world(late, other, models=({**TURNS[0], "first_token": "0.1s"},)) as live:
        live.state.budget = RetryBudget(SystemClock(), share=0.0, least=0)
        answer = await live.chat()
        assert answer.is_complete and answer.headers["x-headway-attempts"] == "1"
    assert len(late.asked) == 1 and not other.asked


async def test_time_in_which_the_gateway_stood_still_is_not_the_upstreams() -> None:
    loop, budget = asyncio.get_running_loop(), RetryBudget(SystemClock())
    token = loop.create_future()
    async with asyncio.timeout(60.0) as limit:
        patience = FirstTokenTimeout(limit, budget, 0.05)
        loop.call_soon(time.sleep, 0.3)  # the loop is held up, and the token comes meanwhile
        loop.call_later(0.1, token.set_result, None)
        await token
        patience.end()


@pytest.mark.parametrize("headway", [True, False])
async def test_an_upstream_that_falls_silent_is_left(
    headway: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing for `SILENCE_S` amid a stream: it goes on elsewhere, or ends with an error."""
    monkeypatch.setattr("headway.gateway.stream.SILENCE_S", 0.3)
    bad = Stub("a", headway=headway, fault=lambda number: "hush3")
    async with world(bad, Stub("b", headway=headway), models=TURNS) as live:
        answer = await asyncio.wait_for(live.chat(), 20.0)
        assert live.state.metrics.of("attempts", upstream="a", outcome="timeout") == 1
    assert answer.is_complete == headway
    assert headway or (b'"upstream_timeout"' in answer.data and b"DONE" not in answer.data)


async def test_time_in_which_nobody_reads_is_no_silence() -> None:
    """While what it said is handed on it need say no more; then it is waited for."""
    told: list[str] = []

    async def listened_to() -> None:
        async with asyncio.timeout(60.0) as limit:
            with SilenceTimeout(limit, 0.05) as silence:
                silence.since_s = inf
                await asyncio.sleep(0.4)
                told.append("handed on")
                silence.since_s = asyncio.get_running_loop().time()
                await asyncio.sleep(60.0)

    with pytest.raises(TimeoutError):
        await listened_to()
    assert told


async def test_a_late_first_token_ends_its_attempt() -> None:
    async def late() -> None:
        async with asyncio.timeout(60.0) as limit:
            FirstTokenTimeout(limit, RetryBudget(SystemClock()), 0.05)
            await asyncio.sleep(30.0)

    with pytest.raises(TimeoutError):
        await late()


@pytest.mark.parametrize("fault", ["", "half"])
async def test_a_stream_of_another_kind_breaks_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Other fields, comments and blank lines, two ends, half a character behind all of the text."""
    odd = [
        b"id: 7\r\nevent: x y\r\nretry: 1\r\ndata: %b\r\n\r\n",
        b": a comment\n\ndata: %b\n\n",
        b"data: %b\n\n\n\n",
    ]
    original = Stub._write

    async def written(self, request, answer, body, fault):  # type: ignore[no-untyped-def]
        write = answer.write

        async def oddly(data: bytes) -> None:
            payload = data.removeprefix(b"data: ").removesuffix(b"\n\n")
            await write(random.Random(len(data)).choice(odd) % payload)

        answer.write = oddly
        await original(self, request, answer, body, fault)
        if fault == "half":
            await write(b'data: {"choices": [{"delta": {"content": "\xc3"}}]}\n\n')
        await write(b"data: [DONE]\n\n")

    monkeypatch.setattr(Stub, "_write", written)
    async with world(Stub("a", fault=lambda number: fault)) as live:
        answer = await live.chat()
        assert answer.is_complete and b"\xc3" not in answer.data
        assert b"\r" not in answer.data and b"id: " not in answer.data


async def test_an_event_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.gateway.events.MAX_EVENT_BYTES", 10_000)

    async def endless(self, request, answer, body, fault):  # type: ignore[no-untyped-def]
        for _ in range(100):
            await answer.write(b"data: " + b"x" * 1000)

    monkeypatch.setattr(Stub, "_write", endless)
    async with world(Stub("a")) as live:
        answer = await live.chat()
    assert (answer.status, answer.json["error"]["code"]) == (502, "lied")


@pytest.mark.parametrize(
    ("num_requests", "seed"),
    [(150, 1), *(pytest.param(800, seed, marks=pytest.mark.hardening) for seed in (1, 2, 3))],
)
async def test_nearly_all_complete_through_every_fault(num_requests: int, seed: int) -> None:
    """Lies and resets at two of four replicas; another is killed; in the long form stalls too."""
    dice = random.Random(seed)
    faults = ["close", "lie", "status503", "error_event", *(f"reset{i}" for i in range(8))]

    def often(number: int) -> str:
        return dice.choice(faults) if dice.random() < 0.15 else ""

    stubs = [Stub(name, headway=True, token_s=0.001) for name in "abcd"]
    stubs[0].fault = stubs[1].fault = often
    models = TURNS
    if num_requests == 800:  # a stall costs whoever waits the time that a first token may take
        stubs[2].fault = lambda number: "stall" if number % 80 == 40 else ""
        models = ({**TURNS[0], "first_token": "3s"},)
    async with world(*stubs, models=models) as live:
        gate, answers = asyncio.Semaphore(40), list[Answer]()

        async def one(number: int) -> None:
            async with gate:
                if number == 3 * num_requests // 8:
                    await stubs[3].stop()
                elif number == 5 * num_requests // 8:
                    await stubs[3].start()
                answers.append(await live.chat())

        await asyncio.gather(*(one(number) for number in range(num_requests)))
        complete = sum(answer.is_complete for answer in answers)
        silent = [a for a in answers if not a.is_complete and b'"error"' not in a.data]
        metrics = live.state.metrics
        attempts, resumed = metrics.of("attempts"), metrics.of("resumed")
    assert complete >= 0.995 * num_requests - 1 and not silent, (complete, silent[:1])
    assert attempts <= 1.1 * num_requests + 3 + resumed
    assert num_requests < 800 or attempts <= 1.13 * num_requests, attempts


async def test_a_client_that_leaves_ends_the_stream_upstream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub("a", headway=True, token_s=0.01)
    ended = asyncio.Event()
    original = StreamedAnswer._relay

    async def watched(self: StreamedAnswer) -> None:
        try:
            await original(self)
        finally:
            ended.set()

    monkeypatch.setattr(StreamedAnswer, "_relay", watched)
    async with world(stub) as live:
        body = {"model": "tiny", "messages": [], "stream": True, "max_tokens": 10_000}
        async with live.http.post("/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
        await ended.wait()
        while live.state.upstreams["a"].speed.flights:
            await asyncio.sleep(0.01)
        assert stub.num_tokens < 1000
        while not live.state.metrics.of("requests", status="left"):
            await asyncio.sleep(0.01)
        assert live.state.metrics.of("attempts", outcome="left") == 1
