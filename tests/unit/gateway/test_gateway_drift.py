"""Drift: the same model behind several upstreams, compared; what differs is found and named."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway_world import Stub, config_of, world
from headway.cli import drift as cli
from headway.cli.gateway import with_probes
from headway.cli.main import main
from headway.core.errors import UsageError
from headway.gateway.cascade.evidence import EvidenceFile, TaskEvidence
from headway.gateway.config import Config, read_config
from headway.gateway.drift.compare import (
    ROUNDING_NATS,
    DriftProbe,
    ProbeAnswer,
    ProbeAnswers,
    compare,
    divergence,
    is_close,
    lower_bound,
    lumped_kl,
    rounding_test,
    sign_test,
)

N = 200
WORDS = ["red", "green", "blue", "white", "black"]


class Model:
    """A model of words: each probe has its distribution, which a variant may move.

    `noise` flips an answer by chance, as a server does that is not deterministic; `moved` are nats
    by which its log-probabilities are moved at random; `sampled` is a temperature.
    """

    def __init__(
        self,
        seed: int,
        *,
        noise: float = 0.0,
        moved: float = 0.0,
        sampled: float = 0.0,
        logprobs: bool = True,
        longer: int = 0,
        limit: int = 0,
    ) -> None:
        self.dice = random.Random(seed)
        self.weights = random.Random(seed + 1)
        self.noise, self.moved, self.sampled = noise, moved, sampled
        self.logprobs, self.longer, self.limit = logprobs, longer, limit

    def says(self, number: int) -> ProbeAnswer:
        """The answer to a probe: six words, of which the first are likeliest by far or hardly."""
        base, moves = random.Random(number), random.Random(f"{number} {self.moved}")
        tokens, top = [], []
        for _ in range(6):
            logits = [base.gauss(0, 3) + moves.gauss(0, self.moved) for _ in WORDS]
            total = sum(2.718281828**x for x in logits)
            from math import log

            logprobs = {w: x - log(total) for w, x in zip(WORDS, logits, strict=True)}
            best = max(logprobs, key=lambda word: logprobs[word])
            if self.sampled:
                shares = [2.718281828 ** (x / self.sampled) for x in logits]
                best = self.dice.choices(WORDS, shares)[0]
            elif self.dice.random() < self.noise:
                best = self.dice.choice(WORDS)
            tokens.append(best)
            top.append(logprobs)
        if self.limit:
            tokens, top = tokens[: self.limit], top[: self.limit]
        return ProbeAnswer(
            text=" ".join(tokens),
            prompt_tokens=20 + number % 5 + self.longer,
            output_tokens=len(tokens),
            ended="length" if self.limit else "stop",
            tokens=tokens if self.logprobs else [],
            top=top if self.logprobs else [],
        )

    def sheet(self, name: str = "u", first: int = 0, count: int = N) -> ProbeAnswers:
        numbers = range(first, first + count)
        return ProbeAnswers(
            upstream=name,
            at=0.0,
            first=[self.says(n) for n in numbers],
            again=[self.says(n) for n in numbers],
        )


# ── what it is made of ──────────────────────────────────────────────────────────────────────


def test_divergence_of_likeliest_tokens() -> None:
    from math import log

    p, q = {"a": log(0.5), "b": log(0.3)}, {"a": log(0.4), "b": log(0.3), "c": log(0.1)}
    assert lumped_kl(p, q) == pytest.approx(0.0305, abs=1e-4)
    assert lumped_kl(p, p) == pytest.approx(0.0)
    first = ProbeAnswer(text="a b", tokens=["a", "b"], top=[p, p])
    other = ProbeAnswer(text="c b", tokens=["c", "b"], top=[p, {"z": 0.0}])
    assert divergence(first, other) == pytest.approx(0.0), "behind another word all is another"
    assert divergence(first, ProbeAnswer(text="a")) is None


def test_signs_and_bounds() -> None:
    assert sign_test([True] * 10 + [False] * 9, [False] * 19) == 2**-10
    assert sign_test([True, False], [False, True]) == 0.75 and sign_test([], []) == 1.0
    assert lower_bound([1.0, 1.0, 1.0]) == 1.0 and lower_bound([5.0]) == float("-inf")
    assert lower_bound([0.0, 2.0] * 50) == pytest.approx(1.0 - 3.09 / 10, abs=0.01)


def test_where_two_tokens_are_as_good_as_alike_rounding_chooses() -> None:
    near, far = {"a": -0.7, "b": -0.75}, {"a": -0.1, "b": -2.4}
    for top, close in ((near, True), (far, False)):
        first = ProbeAnswer(text="x a", tokens=["x", "a"], top=[{"x": 0.0}, top])
        other = ProbeAnswer(text="x b", tokens=["x", "b"], top=[{"x": 0.0}, top])
        assert is_close(first, other) is close
    assert not is_close(ProbeAnswer(text="x", tokens=["x"], top=[near]), ProbeAnswer(text="")), (
        "it only ends"
    )
    gone = ProbeAnswer(text="c", tokens=["c"], top=[{"c": -0.1}])
    assert not is_close(ProbeAnswer(text="a", tokens=["a"], top=[near]), gone), (
        "not among the likeliest"
    )
    assert rounding_test(19, N) == pytest.approx(0.0005, abs=1e-4)
    assert rounding_test(18, N) == pytest.approx(0.0012, abs=1e-4) and rounding_test(0, N) == 1.0


# ── what is found, and what is not ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("variant", "suspect"),
    [
        ({"moved": 0.3}, "quantization"),
        ({"moved": 8.0}, "another model"),
        ({"sampled": 0.5}, "sampling: it answers differently"),
        ({"longer": -1}, "template: prompts have -1 to -1"),
        ({"limit": 3}, "truncation: its answers end earlier"),
        ({"moved": 0.3, "logprobs": False}, "weights or template"),
    ],
)
def test_a_variant_is_found_and_named(variant: dict[str, Any], suspect: str) -> None:
    found = compare(Model(1).sheet("a"), Model(2, **variant).sheet("b"))
    assert found.alarm and found.suspect.startswith(suspect), found


def test_prompts_that_are_cut_are_a_truncation() -> None:
    whole = Model(1).sheet("a")
    cut = [
        msgspec.structs.replace(said, prompt_tokens=20) if said.prompt_tokens > 23 else said
        for said in whole.first
    ]
    found = compare(whole, msgspec.structs.replace(whole, upstream="b", first=cut))
    assert found.suspect.startswith("truncation: 40 prompts are shorter, by up to 4")


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_equals_that_are_not_bit_equal_are_alike(noise: float) -> None:
    """200 comparisons: at most one alarm, however often the servers contradict themselves."""
    alarms = 0
    for seed in range(200 if noise == 0.01 else 20):
        a, b = Model(3 * seed, noise=noise), Model(3 * seed + 1, noise=noise)
        found = compare(a.sheet(first=seed, count=40), b.sheet(first=seed, count=40))
        alarms += found.alarm
        assert noise or (found.changed == 0 and found.kl == 0.0)
    assert alarms <= 1


def test_rounding_is_below_the_floor() -> None:
    """Log-probabilities that differ as those of bf16 and fp32 do change few answers."""
    found = compare(Model(1).sheet("a"), Model(1, moved=0.005).sheet("b"))
    assert not found.alarm and found.kl is not None and 0 < found.kl < ROUNDING_NATS


# ── in a gateway ────────────────────────────────────────────────────────────────────────────

PROBES = tuple(
    DriftProbe(messages=[{"role": "user", "content": f"word {number}"}], max_tokens=4)
    for number in range(30)
)
BOTH = {"name": "tiny", "policy": "round_robin"}


def drifting(config: Config) -> Config:
    from headway.gateway.config import DriftRow

    return msgspec.structs.replace(config, drift=DriftRow(), probes=PROBES)


async def rounds(live: Any, count: int) -> list[dict[str, Any]]:
    """What /stats shows once so many rounds are over."""
    async with asyncio.timeout(120):
        while live.state.drift.num_rounds < count:
            await asyncio.sleep(0.02)
    found: list[dict[str, Any]] = (await (await live.http.get("/stats")).json())["drift"]
    return found


async def test_a_gateway_compares_its_upstreams_and_voids_evidence(tmp_path: Path) -> None:
    """b becomes another one: an alarm beside a, and beside itself as it was before."""
    cascade = {"cheap": "small", "evidence": "e.json"}
    models = (
        {"name": "tiny", "upstreams": ["a", "b"], "cascade": cascade, "policy": "round_robin"},
        {"name": "small", "upstreams": ["c"]},
    )
    task = TaskEvidence(task="default", asked=99, cheap_right=99, dear_right=99, use=True)
    known = EvidenceFile(
        model="tiny", cheap="small", made_at=4e9, tolerance=0.05, alpha=0.05, tasks=[task]
    )
    stubs = [Stub("a", fingerprint="fp_1"), Stub("b", fingerprint="fp_2"), Stub("c")]
    more = {"evidence": {"tiny": known}}
    async with world(*stubs, folder=tmp_path, models=models, **more) as live:
        await live.state.reload(drifting(config_of(stubs, *models, **more)))
        (found,) = await rounds(live, 1)
        assert (found["first"], found["second"], found["alarm"]) == ("a", "b", False)
        assert found["probes"] == 30 and found["changed"] == 0 and found["kl"] == 0.0
        assert len(stubs[0].asked) == 60 and stubs[0].asked[0]["top_logprobs"] == 20
        assert (await live.chat()).headers["x-headway-upstream"] == "c"
        whole = stubs[1]._whole
        stubs[1]._whole = lambda body: whole({**body, "max_tokens": 3})  # type: ignore[method-assign]
        stubs[1].fingerprint = "fp_3"
        live.state.upstreams["b"].fingerprint = "fp_3"  # as a look at a Headway server tells it
        pairs = {(one["first"], one["second"]): one["alarm"] for one in await rounds(live, 2)}
        assert pairs == {
            ("a", "b"): True,
            ("baseline", "a"): False,
            ("baseline", "b"): True,
        }
        assert (await live.chat()).headers["x-headway-upstream"] != "c"
        stats = await (await live.http.get("/stats")).json()
        assert "b drifts: " in stats["routes"][0]["cascade"]["void"]
        text = await (await live.http.get("/metrics")).text()
        assert 'drift_alarm{model="tiny",first="a",second="b"} 1.0' in text


async def test_baselines_outlive_the_gateway(tmp_path: Path) -> None:
    stubs = [Stub("a"), Stub("b")]
    for number, alarm in ((1, False), (2, True)):
        async with world(*stubs, folder=tmp_path, models=(BOTH,)) as live:
            await live.state.reload(drifting(config_of(stubs, BOTH)))
            found = {one["first"]: one["alarm"] for one in await rounds(live, 1)}
            assert found.get("baseline", False) is alarm and len(found) == number
        for stub in stubs:  # both are replaced alike while the gateway is down
            whole = stub._whole
            stub._whole = lambda body, whole=whole: whole({**body, "max_tokens": 3})  # type: ignore


async def test_an_upstream_that_is_down_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.gateway.drift.ask.BUSY_S", 0.01)
    stubs = [Stub("a"), Stub("b", fault=lambda number: "status503")]
    async with world(*stubs, models=(BOTH,)) as live:
        await live.state.reload(drifting(config_of(stubs, BOTH)))
        assert await rounds(live, 1) == []


# ── the command ─────────────────────────────────────────────────────────────────────────────


async def test_the_command_compares_urls() -> None:
    stubs = [Stub("a"), Stub("b"), Stub("c")]
    whole = stubs[2]._whole
    stubs[2]._whole = lambda body: whole({**body, "max_tokens": 3})  # type: ignore[method-assign]
    for stub in stubs:
        await stub.start()
    try:
        config = cli.read_upstreams([stub.url for stub in stubs])
        found = await cli.compare_upstreams(config, ["*"], list(PROBES), lambda: None)
    finally:
        for stub in stubs:
            await stub.stop()
    assert [each.alarm for each in found] == [False, True]
    assert stubs[0].asked[0]["model"] == "tiny"


async def test_a_busy_upstream_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fifth probe is refused at first, the very first one as well; none of them is lost."""
    monkeypatch.setattr("headway.gateway.drift.ask.BUSY_S", 0.01)
    stubs = [Stub("a"), Stub("b", fault=lambda number: "status503" if number % 5 == 1 else "")]
    for stub in stubs:
        await stub.start()
    try:
        config = cli.read_upstreams([stub.url for stub in stubs])
        (found,) = await cli.compare_upstreams(config, ["*"], list(PROBES), lambda: None)
    finally:
        for stub in stubs:
            await stub.stop()
    assert not found.alarm and found.probes == len(PROBES) and found.changed == 0
    assert found.kl == 0.0, "its log-probabilities are still asked for"
    assert len(stubs[1].asked) > 2 * len(PROBES)


def test_probes_are_the_same_each_time(tmp_path: Path) -> None:
    first, again = cli.read_probes("", 40), cli.read_probes("", 40)
    assert first == again and len({str(probe.messages) for probe in first}) == 40
    many = cli.read_probes("", 4000)  # more than the rarest skill has in its turn
    assert many[:40] == first and len({str(probe.messages) for probe in many}) == 4000
    file = tmp_path / "probes.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(probe) for probe in PROBES))
    assert cli.read_probes(str(file), 20) == list(PROBES[:20])
    file.write_text("{}")
    with pytest.raises(UsageError, match="missing required field `messages`"):
        cli.read_probes(str(file), 20)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("http://a/v1",), "two URLs"),
        (("FILE",), "No model has two upstreams"),
        (("http://a/v1", "http://b/v1", "--probes=none"), "No such file"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("upstreams: [{name: a, url: 'http://a/v1'}]\n")
    assert (
        main(["gateway", "drift", *(str(file) if word == "FILE" else word for word in words)]) == 2
    )
    assert message in capsys.readouterr().err


def test_a_dry_run_says_who_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "drift", "http://a/v1", "http://b/v1", "--number=20", "--dry-run"]) == 0
    assert "20 probes, twice, to a, b" in capsys.readouterr().out


@pytest.mark.parametrize("row", ["{every: soon}", "{number: 3}", "{evry: 60m}"])
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, row: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(f"upstreams: [{{name: a, url: 'http://a/v1'}}]\ndrift: {row}\n")
    with pytest.raises(UsageError):
        read_config(file)
    file.write_text("upstreams: [{name: a, url: 'http://a/v1'}]\ndrift: {number: 24}\n")
    assert len(with_probes(read_config(file)).probes) == 24
