"""Cascades: cheap first where evidence says so, checked, and the dear route for all else."""

import random
from pathlib import Path
from typing import Any

import pytest

from gateway_world import Gateway, Stub, text_of, world
from headway.core.errors import UsageError
from headway.gateway.answers import AnswerContent, parse_answer, parse_stream
from headway.gateway.cascade.checks import fits, mark_of
from headway.gateway.cascade.evidence import (
    EvidenceFile,
    RoutePair,
    TaskEvidence,
    evaluate_task,
    lower_share_bound,
    upper_bound,
)
from headway.gateway.cascade.rows import TaskRule
from headway.gateway.config import read_config
from headway.gateway.dialects import DIALECTS
from headway.gateway.events import Event

ROW: dict[str, Any] = {"cheap": "small", "evidence": "e.json", "checks": ["margin"]}
MODELS = (
    {"name": "tiny", "upstreams": ["b"], "cascade": ROW},
    {"name": "small", "upstreams": ["a"]},
)


def evidence(made_at: float = 4e9, fingerprint: str = "", **fields: Any) -> dict[str, Any]:
    """Evidence that the task `sort` may be asked cheaply with a margin of 2 nats."""
    task = {"task": "sort", "check": "margin", "least": 2.0, "use": True, **fields}
    row = TaskEvidence(asked=200, cheap_right=190, dear_right=199, **task)
    known = {"cheap": [fingerprint]} if fingerprint else {}
    return {
        "evidence": {
            "tiny": EvidenceFile(
                model="tiny",
                cheap="small",
                made_at=made_at,
                tolerance=0.05,
                alpha=0.05,
                fingerprints=known,
                tasks=[row],
            )
        }
    }


def pair(cheap: bool, dear: bool, score: float | None, cost: float = 0.1) -> RoutePair:
    return RoutePair(
        task="t",
        cheap_right=cheap,
        dear_right=dear,
        fits=True,
        scores={"margin": score},
        cheap_cost=cost,
        dear_cost=1.0,
    )


# ── evidence ────────────────────────────────────────────────────────────────────────────────


def test_bounds_are_exact() -> None:
    assert upper_bound(0, 59, 0.05) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert upper_bound(1, 150, 0.05) == pytest.approx(0.0312, abs=1e-4)
    assert upper_bound(5, 5, 0.05) == 1.0
    assert lower_share_bound(0, 9, 0.05) == 0.0
    assert lower_share_bound(59, 59, 0.05) == pytest.approx(0.05 ** (1 / 59))


def test_a_threshold_keeps_right_answers_and_leaves_the_others() -> None:
    """Wrong answers have small margins: the cascade takes the others, and costs less."""
    pairs = [pair(True, True, 3.0 + i % 7) for i in range(120)]
    pairs += [pair(False, True, 0.5) for _ in range(80)]
    found = evaluate_task(pairs, 0.05, 0.05)
    assert found.use and found.check == "margin" and found.least == 3.0
    assert (found.accepted, found.lost) == (120, 0) and found.loss_high <= 0.05
    assert found.cost == pytest.approx(0.1 + 80 / 200)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([pair(True, True, 5.0)] * 40, "40 questions are too few"),
        ([pair(False, True, 5.0)] * 200, "it loses too many right answers"),
        ([pair(True, True, 5.0, cost=1.2)] * 200, "it costs no less"),
    ],
)
def test_without_evidence_the_dear_route_is_used(pairs: list[RoutePair], why: str) -> None:
    found = evaluate_task(pairs, 0.05, 0.05)
    assert not found.use and found.why == why


def test_a_check_that_costs_nothing_is_left_out_where_all_is_right() -> None:
    found = evaluate_task([pair(True, True, None)] * 200, 0.05, 0.05)
    assert found.use and found.check == "" and found.accepted == 200


def test_a_task_that_loses_too_much_passes_rarely() -> None:
    """Wrong answers that no margin tells apart, 5% of all: the bound holds in 19 of 20 runs."""
    passed = 0
    for seed in range(100):
        dice = random.Random(seed)
        pairs = [pair(dice.random() > 0.05, True, dice.random()) for _ in range(150)]
        found = evaluate_task(pairs, 0.05, 0.05)
        passed += found.use and found.accepted > 149
    assert passed <= 100 * 0.05 + 5


# ── what checks see ─────────────────────────────────────────────────────────────────────────


def test_margin_is_the_least_gap() -> None:
    seen = AnswerContent(chosen=[-0.1, -0.7], top=[{"a": -0.1, "b": -2.4}, {"c": -0.7, "d": -0.7}])
    assert seen.margin == 0.0
    assert AnswerContent(text="x").margin is None
    assert AnswerContent(chosen=[-3.0], top=[{"a": -0.1, "b": -2.4}]).margin == pytest.approx(-2.9)


@pytest.mark.parametrize(
    ("path", "data", "ended", "calls"),
    [
        (
            "/v1/chat/completions",
            b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}',
            *("stop", False),
        ),
        (
            "/v1/completions",
            b'{"choices": [{"text": "hi", "finish_reason": "length"}]}',
            "length",
            0,
        ),
        (
            "/v1/responses",
            b'{"id": "r", "status": "completed", "output": [{"type": "message", "content": '
            b'[{"type": "output_text", "text": "hi"}]}, {"type": "function_call"}]}',
            *("completed", True),
        ),
        (
            "/v1/messages",
            b'{"content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn"}',
            *("end_turn", False),
        ),
    ],
)
def test_whole_answers_of_each_dialect(path: str, data: bytes, ended: str, calls: bool) -> None:
    seen = parse_answer(DIALECTS[path], data)
    assert (seen.text, seen.ended, seen.calls) == ("hi", ended, bool(calls))
    assert fits({}, seen) is (ended != "length")


def test_streams_say_what_whole_answers_say() -> None:
    events = [
        Event(b"message_start", b'{"type": "message_start", "message": {}}'),
        Event(b"content_block_delta", b'{"type": "x", "delta": {"text": "h"}}'),
        Event(b"content_block_delta", b'{"type": "x", "delta": {"text": "i"}}'),
        Event(b"message_delta", b'{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}'),
    ]
    assert parse_stream(DIALECTS["/v1/messages"], events) == AnswerContent(
        text="hi", ended="end_turn"
    )
    response = b'{"status": "incomplete", "output": [{"type": "message", "content": []}]}'
    done = [Event(b"", b'{"type": "response.incomplete", "response": ' + response + b"}")]
    assert not parse_stream(DIALECTS["/v1/responses"], done).is_whole


def test_forms_and_marks() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert fits(asked, AnswerContent(text='{"a": 1}', ended="stop"))
    assert not fits(asked, AnswerContent(text='{"a": "b"}', ended="stop"))
    assert not fits({}, AnswerContent(text="  ", ended="stop"))
    of_responses = {"text": {"format": {"type": "json_schema", "schema": schema}}}
    assert not fits(of_responses, AnswerContent(text="no", ended="completed"))
    assert mark_of('{"mark": 7}') == 0.7 and mark_of("seven") is None


# ── requests ────────────────────────────────────────────────────────────────────────────────


async def sorted_by(live: Gateway, stream: bool, task: str = "sort", **fields: Any) -> str:
    """Who answered a chat of a task; it is complete, and nothing of the check is in it."""
    answer = await live.chat(stream=stream, metadata={"task": task}, **fields)
    assert answer.status == 200 and answer.text == text_of(8)
    assert b'"logprob":' not in answer.data.replace(b" ", b"")
    assert not stream or answer.is_complete
    assert b"usage" not in answer.data or not stream
    return answer.headers["x-headway-upstream"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_cheap_route_answers_what_passes_its_check(tmp_path: Path, stream: bool) -> None:
    cheap, dear = Stub("a"), Stub("b")
    async with world(cheap, dear, folder=tmp_path, models=MODELS, **evidence()) as live:
        assert await sorted_by(live, stream) == "a" and not dear.asked
        cheap.gap = 1.0
        assert await sorted_by(live, stream) == "b"
        assert cheap.asked[-1]["logprobs"] is True and "logprobs" not in dear.asked[-1]
        assert await sorted_by(live, stream, task="other") == "b" and len(cheap.asked) == 2
        cheap.gap, cheap.fault = 9.0, lambda number: "status503" if number == 3 else ""
        assert await sorted_by(live, stream) == "b"
        assert await sorted_by(live, stream, n=1, logprobs=False) == "a"
        (row,) = [route for route in (await stats(live))["routes"] if route["model"] == "tiny"]
        (told,) = row["cascade"]["tasks"]
        assert (told["accepted_now"], told["rejected"], told["failed"]) == (2, 1, 1)
        assert row["cascade"]["unknown"] == 1
        metric = 'cascade_total{route="tiny",task="sort",outcome="rejected"} 1'
        assert metric in await (await live.http.get("/metrics")).text()
        usage = 10 * 1.0 - 4 * 0.5 + 8 * 2.0
        spent = live.state.tasks.totals["all", ""].dollars
        assert spent == pytest.approx(6 * usage / 1e6), "both attempts of a rejected one count"


async def stats(live: Gateway) -> Any:
    return await (await live.http.get("/stats")).json()


async def test_evidence_is_void_by_age_and_by_another_model(tmp_path: Path) -> None:
    for known, answered, why in (
        (evidence(made_at=1e9), ["b"], "days old"),
        (evidence(fingerprint="fp_1"), ["a", "b", "b"], "fingerprint has changed"),
        ({}, ["b"], "is not there"),
    ):
        cheap = Stub("a", fingerprint="fp_1")
        async with world(cheap, Stub("b"), models=MODELS, **known) as live:
            for number, name in enumerate(answered):
                cheap.fingerprint = "fp_1" if number == 0 else "fp_2"
                assert await sorted_by(live, False) == name
            cascade = (await stats(live))["routes"][0]["cascade"]
            assert why in cascade["void"]


async def test_a_rule_finds_the_class_of_who_names_none() -> None:
    rules = {"tasks": [TaskRule(name="sort", matches="rivers")]}
    async with world(Stub("a"), Stub("b"), models=MODELS, **evidence(), **rules) as live:
        assert (await live.chat()).headers["x-headway-upstream"] == "a"
        other = [{"role": "user", "content": "of hills"}]
        assert (await live.chat(messages=other)).headers["x-headway-upstream"] == "b"


async def test_a_second_answer_that_is_another_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    models = (MODELS[0] | {"cascade": ROW | {"checks": ["agree"]}}, MODELS[1])
    cheap = Stub("a")
    known = evidence(check="agree", least=0.9)
    async with world(cheap, Stub("b"), models=models, **known) as live:
        assert await sorted_by(live, False) == "a" and cheap.asked[1]["temperature"] == 0.8
        whole = cheap._whole
        monkeypatch.setattr(
            cheap,
            "_whole",
            lambda body: whole({**body, "max_tokens": 3 if "temperature" in body else 8}),
        )
        assert await sorted_by(live, False) == "b"


async def test_a_rollout_is_told_of_the_dear_route_alone() -> None:
    rollout = {"name": "r", "model": "tiny", "canary": ["c"], "steps": [50], "needs": ["errors"]}
    models = (MODELS[0] | {"upstreams": ["b", "c"]}, MODELS[1])
    cheap = Stub("a", gap=0.0)
    stubs = (cheap, Stub("b"), Stub("c"))
    async with world(*stubs, models=models, rollouts=[rollout], **evidence()) as live:
        for _ in range(10):
            await sorted_by(live, False)
        sums = live.state.rollouts["tiny"].evidence["errors"].sums
        assert sums.control + sums.canary == 10 and len(cheap.asked) == 10


@pytest.mark.parametrize(
    ("cascade", "message"),
    [
        ("{cheap: smal, evidence: e}", "Did you mean small"),
        ("{cheap: small, evidence: e, checks: [scorer]}", "cascade.scorer must be set"),
        ("{cheap: small, evidence: e, checks: [judge], judge: small}", "writes the answers"),
        ("{cheap: free, evidence: e}", "upstream c has no price"),
        ("{cheap: small, evidence: bad.json}", "is no evidence"),
        ("{cheap: small, evidence: e, within: soon}", "within"),
    ],
)
def test_cascades_that_do_not_fit_are_refused(tmp_path: Path, cascade: str, message: str) -> None:
    (tmp_path / "bad.json").write_text("{}")
    file = tmp_path / "gateway.yaml"
    priced = "price: {hour: 1}"
    file.write_text(
        f"upstreams: [{{name: a, url: 'http://a/v1', {priced}}}, "
        f"{{name: b, url: 'http://b/v1', {priced}}}, {{name: c, url: 'http://c/v1'}}]\n"
        f"models: [{{name: chat, upstreams: [b], cascade: {cascade}}}, "
        "{name: small, upstreams: [a]}, {name: free, upstreams: [c]}]\n"
    )
    with pytest.raises(UsageError) as raised:
        read_config(file)
    assert message in f"{raised.value.cause} {raised.value.fix}"
