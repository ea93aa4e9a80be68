"""`headway gateway calibrate`: evidence from questions to both routes, and what it refuses."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from gateway_world import Stub, config_of, text_of, world
from headway.cli import calibrate as cli
from headway.cli.main import main
from headway.config.options import CalibrateOptions, GatewayOptions
from headway.core.errors import HeadwayError, UsageError
from headway.gateway.cascade.calibrate import CalibrationQuestion, CascadeCalibration, cost_of
from headway.gateway.cascade.evidence import EvidenceFile, read_evidence
from headway.gateway.config import PERIODS_S, read_config
from headway.gateway.state import GatewayState

SMALL = {"name": "small", "upstreams": ["a"]}
MESSAGES = [{"role": "user", "content": "Sort these."}]
LINE = {"task": "sort", "messages": MESSAGES, "answer": text_of(8).strip(), "max_tokens": 8}


def tiny(**cascade: Any) -> dict[str, Any]:
    row = {"cheap": "small", "evidence": "e.json", **cascade}
    return {"name": "tiny", "upstreams": ["b"], "cascade": row}


def questions(count: int, task: str = "sort", length: int = 8) -> list[CalibrationQuestion]:
    """Questions whose right answer is the stub's own of this length."""
    right = text_of(length)
    return [
        CalibrationQuestion(
            task=task, messages=MESSAGES, max_tokens=8, accepts=lambda text: text == right
        )
        for _ in range(count)
    ]


async def evidence_of(
    cheap: Stub,
    dear: Stub,
    asked: list[CalibrationQuestion],
    *models: dict[str, Any],
    **prices: Any,
) -> EvidenceFile:
    """The evidence of a cascade before these stubs."""
    for stub in (cheap, dear):
        await stub.start()
    given = models or (tiny(), SMALL)
    config = config_of([cheap, dear], *given, **prices)
    state = GatewayState(options=GatewayOptions(), config=config)
    try:
        calibration = CascadeCalibration(state, state.routes["tiny"], 1)
        return await calibration.run(asked, tolerance=0.05, alpha=0.05)
    finally:
        await state.stop()
        for stub in (cheap, dear):
            await stub.stop()


def shorter(stub: Stub, count: int) -> Stub:
    """The stub whose answers have so many tokens, whatever was asked for."""
    whole = stub._whole
    stub._whole = lambda body: whole({**body, "max_tokens": count})  # type: ignore[method-assign]
    return stub


async def test_both_routes_are_asked_and_what_is_lost_is_counted() -> None:
    cheap, dear = Stub("a", fingerprint="fp_c"), Stub("b", fingerprint="fp_d")
    asked = questions(100) + questions(100, "long", length=9)
    found = await evidence_of(cheap, dear, asked)
    assert (found.model, found.cheap) == ("tiny", "small")
    assert found.fingerprints == {"cheap": ["fp_c"], "dear": ["fp_d"]}
    assert len(cheap.asked) == len(dear.asked) == 200
    assert cheap.asked[0]["top_logprobs"] == 2 and "logprobs" not in dear.asked[0]
    assert {body["temperature"] for body in cheap.asked + dear.asked} == {0}
    first, second = found.tasks
    assert (first.task, first.asked, first.cheap_right, first.dear_right) == ("sort", 100, 100, 100)
    assert (second.cheap_right, second.dear_right, second.lost) == (0, 0, 0)
    usage = 6 * 1.0 + 4 * 0.5 + 8 * 2.0
    assert first.cheap_cost == first.dear_cost == pytest.approx(usage / 1e6)
    assert not first.use and first.why == "it costs no less", "two stubs of one price"


async def test_a_worse_model_is_not_used() -> None:
    found = await evidence_of(shorter(Stub("a"), 2), Stub("b"), questions(100))
    (task,) = found.tasks
    assert not task.use and task.why == "it loses too many right answers"
    assert (task.cheap_right, task.dear_right) == (0, 100)


async def test_the_cheaper_of_two_that_are_right_is_used() -> None:
    dear = {"price": {"input": 50.0, "output": 50.0}}
    found = await evidence_of(Stub("a"), Stub("b"), questions(100), b=dear)
    (task,) = found.tasks
    assert task.use and task.check == "" and task.accepted == 100 and task.lost == 0
    assert task.cost == task.cheap_cost < 0.1 * task.dear_cost
    assert 0.0 == task.loss_low < task.loss_high < 0.05


async def test_a_route_that_does_not_answer_is_an_error() -> None:
    dear = Stub("b", fault=lambda number: "status500" if number > 5 else "")
    with pytest.raises(HeadwayError, match="tiny does not answer: b: status 500"):
        await evidence_of(Stub("a"), dear, questions(20))


async def test_a_price_by_the_hour_is_that_of_the_time() -> None:
    from headway.gateway.probe import ask

    stub = Stub("a")
    await stub.start()
    config = config_of([stub], {"name": "tiny"}, a={"price": {"hour": 36.0}})
    state = GatewayState(options=GatewayOptions(), config=config)
    try:
        upstream = state.upstreams["a"]
        reply = await ask(upstream, "tiny", {"messages": MESSAGES}, 60.0)
        assert cost_of(upstream, reply) == pytest.approx(reply.seconds / PERIODS_S["hour"] * 36)
    finally:
        await state.stop()
        await stub.stop()


# ── checks that ask others ──────────────────────────────────────────────────────────────────


@pytest_asyncio.fixture
async def scorer() -> AsyncIterator[tuple[str, list[Any]]]:
    """A scorer of the user's: half a point for each token; what it was asked."""
    asked: list[Any] = []

    async def score(request: web.Request) -> web.Response:
        asked.append(await request.json())
        count = len(asked[-1]["answer"].split())
        return web.json_response({"score": count / 2, "why": "length"})

    app = web.Application()
    app.router.add_post("/score", score)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/score", asked
    await runner.cleanup()


async def test_a_scorer_decides(scorer: tuple[str, list[Any]], tmp_path: Path) -> None:
    """The threshold that calibration finds is the one that requests go by."""
    url, asked = scorer
    row = tiny(checks=["scorer"], scorer=url)
    long, short = questions(100), questions(100, length=2)
    cheap = Stub("a")
    whole = cheap._whole
    cheap._whole = lambda body: whole(  # type: ignore[method-assign]
        {**body, "max_tokens": 8 if len(cheap.asked) % 2 else 1}
    )
    prices = {"a": {"price": {"output": 0.001}}, "b": {"price": {"output": 9.0}}}
    found = await evidence_of(cheap, Stub("b"), long + short, row, SMALL, **prices)
    (task,) = found.tasks
    assert task.use and (task.check, task.least) == ("scorer", 4.0) and task.lost == 0
    assert asked[0]["task"] == "sort" and asked[0]["request"]["messages"] == MESSAGES
    again = {"evidence": {"tiny": found}}
    fresh = Stub("a")
    async with world(fresh, Stub("b"), models=(row, SMALL), folder=tmp_path, **again) as live:
        answer = await live.chat(metadata={"task": "sort"})
        assert answer.headers["x-headway-upstream"] == "a" and answer.is_complete
        answer = await live.chat(metadata={"task": "sort"}, max_tokens=5, stream=False)
        assert answer.headers["x-headway-upstream"] == "b", "five tokens are 2.5 points"


@pytest.mark.parametrize(
    ("mark", "answered"), [('{"mark": 9}', "a"), ('{"mark": 2}', "b"), ("good", "b")]
)
async def test_a_judge_decides(mark: str, answered: str) -> None:
    row = tiny(checks=["judge"], judge="critic")
    critic = Stub("c")
    whole = critic._whole

    def judged(body: dict[str, Any]) -> dict[str, Any]:
        answer = whole(body)
        answer["choices"][0]["message"]["content"] = mark
        return answer

    critic._whole = judged  # type: ignore[method-assign]
    known = {"evidence": {"tiny": evidence_with("judge", 0.8)}}
    models = (row, SMALL, {"name": "critic", "upstreams": ["c"]})
    async with world(Stub("a"), Stub("b"), critic, models=models, **known) as live:
        answer = await live.chat(metadata={"task": "sort"}, stream=False)
        assert answer.headers["x-headway-upstream"] == answered
        (asked,) = critic.asked
        assert asked["response_format"]["json_schema"]["schema"]["required"] == ["mark"]
        assert "t0 t1" in asked["messages"][1]["content"]
        assert live.state.metrics.of("attempts", upstream="c", outcome="check") == 1


def evidence_with(check: str, least: float) -> EvidenceFile:
    data = {
        **{"model": "tiny", "cheap": "small", "made_at": 4e9, "tolerance": 0.05, "alpha": 0.05},
        "tasks": [
            {"task": "sort", "asked": 1, "cheap_right": 1, "dear_right": 1}
            | {"check": check, "least": least, "use": True}
        ],
    }
    import msgspec

    return msgspec.convert(data, EvidenceFile)


async def test_a_scorer_that_is_down_rejects() -> None:
    row = tiny(checks=["scorer"], scorer="http://127.0.0.1:9/score")
    known = {"evidence": {"tiny": evidence_with("scorer", 0.1)}}
    async with world(Stub("a"), Stub("b"), models=(row, SMALL), **known) as live:
        answer = await live.chat(metadata={"task": "sort"})
        assert answer.headers["x-headway-upstream"] == "b" and answer.is_complete


# ── the command ─────────────────────────────────────────────────────────────────────────────


def options(**given: Any) -> CalibrateOptions:
    return CalibrateOptions(**given)


def test_the_suite_of_skills_has_a_class_each() -> None:
    found = list(cli.suite_questions(options(questions=3, skills=["sort", "copy"], levels=[1])))
    assert [one.task for one in found] == ["sort"] * 3 + ["copy"] * 3
    assert not found[0].accepts("no") and found[0].max_tokens == 64


def suite_of(folder: Path, *lines: Any) -> CalibrateOptions:
    file = folder / "suite.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return options(suite=str(file))


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    pattern = {"task": "p", "messages": MESSAGES, "pattern": "a+"}
    first, second = cli.suite_questions(suite_of(tmp_path, LINE, pattern))
    assert first.accepts(" t0 t1 t2 t3 t4 t5 t6 t7\n") and not first.accepts("t0")
    assert second.accepts("aaa") and not second.accepts("ab") and second.max_tokens == 256


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"task": "t", "messages": MESSAGES}, "say either answer or pattern"),
        ({"task": "t", "messages": MESSAGES, "answer": "a", "pattern": "a"}, "say either"),
        ({"task": "t", "answer": "a"}, "missing required field `messages`"),
        ({"task": "t", "messages": MESSAGES, "pattern": "("}, "unterminated subpattern"),
    ],
)
def test_lines_that_cannot_be_asked(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        list(cli.suite_questions(suite_of(tmp_path, LINE, line)))
    assert message in raised.value.cause and "suite.jsonl:2" in raised.value.cause


def gateway_file(folder: Path, rows: str = "", urls: tuple[str, str] = ("a", "b")) -> Path:
    file = folder / "gateway.yaml"
    upstreams = [
        f"  - {{name: {name}, url: '{url}', price: {{output: {price}}}}}\n"
        for name, url, price in zip("ab", (f"http://{u}/v1" for u in urls), (1, 9), strict=True)
    ]
    cascade = "{cheap: small, evidence: e.json}"
    file.write_text(
        "upstreams:\n" + "".join(upstreams) + "models:\n"
        f"  - {{name: tiny, upstreams: [b], cascade: {cascade}}}\n"
        "  - {name: small, upstreams: [a]}\n" + rows
    )
    return file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "calibrate takes the gateway's file"),
        (("FILE", "--model=small"), "There is tiny"),
        (("FILE", "--suite=none.jsonl"), "No such file"),
        (("FILE", "--skills=sorting"), "there is no skill 'sorting'"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    file = gateway_file(tmp_path)
    given = [str(file) if word == "FILE" else word for word in words]
    assert main(["gateway", "calibrate", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = gateway_file(tmp_path)
    assert (
        main(["gateway", "calibrate", str(file), "--dry-run", "--questions=2", "--levels=1"]) == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("24 questions of arithmetic, ") and str(tmp_path / "e.json") in said
    assert not (tmp_path / "e.json").exists()
    (warning,) = read_config(file).warnings
    assert "there is no e.json; the dear route answers all" in warning


async def test_evidence_is_written_whole_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await evidence_of(Stub("a"), Stub("b"), questions(80))
    path = tmp_path / "e.json"
    cli.write_evidence(path, found)
    assert read_evidence(path) == found and list(tmp_path.iterdir()) == [path]
    assert read_config(gateway_file(tmp_path)).evidence == {"tiny": found}
    cli.print_evidence(found, path)
    assert "dear: it costs no less" in capsys.readouterr().out
    with pytest.raises(UsageError, match="No such file"):
        cli.write_evidence(tmp_path / "none" / "e.json", found)


@pytest.mark.parametrize("told", [{"score": 1}, {"score": "high"}, [], {}])
async def test_what_scorers_may_answer(told: Any) -> None:
    from headway.gateway.probe import PROBE_FAILURES, ScorerClient

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(told)

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url, client = f"http://127.0.0.1:{runner.addresses[0][1]}/", ScorerClient()
    try:
        if told == {"score": 1}:
            assert await client.score(url, {}, 60.0) == 1.0
        else:
            with pytest.raises(PROBE_FAILURES):
                await client.score(url, {}, 60.0)
    finally:
        await client.close()
        await runner.cleanup()
