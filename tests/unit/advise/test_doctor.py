"""The doctor's rules, arithmetic and order on made-up readings; no server, no torch."""

import ast
import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from doctor_cases import (
    BANDWIDTH,
    BESIDE_OTHERS,
    CASES,
    CONTENDED,
    FEW,
    FLOPS,
    GUESSING,
    HEALTHY,
    IN_VAIN,
    LONG,
    QUEUED,
    SLOW,
    WEIGHTS,
    all_at,
    steps,
    varied,
)
from headway.advise import reference, rules
from headway.advise.diagnosis import diagnose, list_findings
from headway.advise.reading import (
    DraftReading,
    ServerReading,
    SpendReading,
    decode_step,
)
from headway.advise.show import split_findings
from headway.advise.words import dollars, duration, plural, rate
from headway.config import options
from headway.config.alternatives import highest
from headway.config.options import EngineOptions
from headway.telemetry.snapshot import Percentiles

ROOT = Path(__file__).resolve().parents[3]
TABLES = [getattr(options, name) for name in options.__all__ if name.endswith("Options")]
ABOUT = ("source", "subject", "server", "seconds", "not_known")


def names(reading: ServerReading) -> list[str]:
    return [each.name for each in list_findings(reading)]


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.name for rule in rules.RULES]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_holds_where_it_should_and_not_beside(name: str) -> None:
    holds, holds_not = CASES[name]
    assert name in names(varied(HEALTHY, holds))
    assert name not in names(varied(HEALTHY, holds_not))


@pytest.mark.parametrize("name", [name for name in CASES if name not in BESIDE_OTHERS])
def test_the_planted_fault_is_the_verdict(name: str) -> None:
    result = diagnose(varied(HEALTHY, CASES[name][0]))
    assert result.bottleneck.name == name, [(each.name, each.share) for each in result.findings]
    assert result.bottleneck.evidence


@pytest.mark.parametrize("name", CASES)
def test_a_finding_has_figures_a_fix_and_a_share(name: str) -> None:
    result = {each.name: each for each in list_findings(varied(HEALTHY, CASES[name][0]))}[name]
    assert 0 <= result.share <= 1
    assert result.evidence and all(result.evidence)
    assert result.fix and "None" not in f"{result.what_if}{result.evidence}"
    assert result.available


def test_contention_comes_before_what_is_worth_more() -> None:
    small = {
        "machine.cores": msgspec.structs.replace(CONTENDED["machine.cores"], others_share=0.01)
    }
    reading = varied(HEALTHY, FEW, CONTENDED, small, {"steps.idle_share": 0.2})
    result = list_findings(reading)
    assert diagnose(reading).bottleneck.name == "contention"
    assert result[0].name == "contention" and result[0].share < max(each.share for each in result)


def test_findings_stand_in_the_order_of_the_table() -> None:
    """What costs nothing comes first; the verdict is the most valuable all the same."""
    result = diagnose(varied(HEALTHY, CASES["over-saturated"][0], CASES["validation"][0], FEW))
    places = [each.name for each in result.findings]
    order = [rule.name for rule in rules.RULES]
    assert places == sorted(places, key=order.index) and len(places) > 2
    assert places.index("validation") < places.index("over-saturated")
    assert result.bottleneck.name == max(result.findings, key=lambda each: each.share).name


def test_the_verdict_is_among_the_findings_that_are_shown() -> None:
    result = diagnose(varied(HEALTHY, CASES["over-saturated"][0]))
    first = result.findings[0]
    others = [msgspec.structs.replace(first, name=f"other {n}") for n in range(6)]
    last = msgspec.structs.replace(first, name="last")
    result = msgspec.structs.replace(
        result,
        findings=[*others, last],
        bottleneck=msgspec.structs.replace(result.bottleneck, name="last"),
    )
    shown, hidden = split_findings(result)
    assert [each.name for each in shown] == ["other 0", "other 1", "other 2", "last"]
    assert [each.name for each in hidden] == ["other 3", "other 4", "other 5"]


def test_drafts_are_advised_where_there_are_none_and_measured_where_there_are() -> None:
    off = diagnose(varied(HEALTHY, FEW))
    (advised,) = [each for each in off.findings if each.name == "drafts"]
    assert advised.fix.startswith("`--speculative-method auto`")
    assert advised.share == pytest.approx(0.988 / 2 * (WEIGHTS / BANDWIDTH) / 0.038, rel=0.01)
    assert off.drafts == []
    on = diagnose(varied(HEALTHY, FEW, {"drafts": GUESSING}))
    assert on.drafts == [
        "62% of 2 draft tokens a step accepted (lookup 50%, draft 75%): 2.25 tokens a step",
        "drafting and verifying take 40% of the time in steps: 1.35 times the tokens/s of steps "
        "without",
    ]
    assert not {"drafts", "drafts-in-vain"} & {each.name for each in on.findings}


def test_rejected_draft_tokens_are_reported() -> None:
    """A third of decoding is lost to them; or they were too dear to be tried, and nothing is."""
    (result,) = [f for f in list_findings(varied(HEALTHY, {"drafts": IN_VAIN})) if "vain" in f.name]
    assert result.share == pytest.approx(0.34 * 0.988, abs=0.01)
    quiet = DraftReading(
        sources=("lookup",), per_step=0.0, tokens_per_step=1.0, cost_share=0.0, speedup=1.0
    )
    (result,) = [f for f in list_findings(varied(HEALTHY, {"drafts": quiet})) if "vain" in f.name]
    assert result.share == 0
    assert result.evidence[0] == "lookup: no draft token pays its cost"
    few = {"drafts": IN_VAIN, "steps.decode": steps(0.04, WEIGHTS, 1e9, count=20)}
    assert "drafts-in-vain" not in names(varied(HEALTHY, few)), "20 steps say little"


PARTS = frozenset(part.name for part in fields(ServerReading) if part.name not in ABOUT)


class Watched(ServerReading):
    """A reading that keeps the names of the parts that were looked at."""

    read_parts: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in PARTS:
            Watched.read_parts.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.name)
def test_a_rule_names_the_parts_that_it_goes_by(rule: rules.Rule) -> None:
    Watched.read_parts.clear()
    for changes in itertools.chain(*CASES.values()):
        reading = varied(HEALTHY, changes)
        rule.holds(
            Watched(**{part.name: getattr(reading, part.name) for part in fields(ServerReading)})
        )
    assert Watched.read_parts == set(rule.reads)


def test_options_that_a_rule_names_are_there_and_take_what_is_said() -> None:
    """A fix is made with options of this version, unless the finding says that it is missing."""
    known = {name for table in TABLES for name in (row.name for row in fields(table))}
    for rule in rules.RULES:
        (result,) = [
            each
            for each in list_findings(varied(HEALTHY, CASES[rule.name][0]))
            if each.name == rule.name
        ]
        named = re.findall(r"--([a-z][a-z0-9-]*)", f"{result.evidence} {result.fix}")
        assert {name.replace("-", "_") for name in named} <= known, rule.name
        assert result.available or rules.MISSING in result.fix, rule.name


def test_a_rule_without_its_option_says_so_and_has_it_with_one() -> None:
    rule = replace(rules.RULES[0], option="--no-such-thing", fix="Warping; walking")
    assert not rule.available and rule.remedy == "Warping: not in this version; walking"
    rule = replace(rule, option="--max-num-seqs")
    assert rule.available and rule.remedy == "Warping; walking"


def test_rows_are_not_asked_for_beyond_what_the_option_takes() -> None:
    waiting = {**CASES["rows"][0], "load.waiting": 9000.0, "steps.rows": 2000.0}
    reading = varied(HEALTHY, waiting, {"limits.max_num_seqs": 2000, "kv.usage_max": 0.2})
    fast = {"steps.decode": steps(0.038, WEIGHTS, 1e6), "load.arrivals_per_s": 5.0}
    (result,) = [each for each in list_findings(varied(reading, fast)) if each.name == "rows"]
    assert result.what_if == "max_num_seqs=4096"
    assert EngineOptions(max_num_seqs=4096).max_num_seqs == highest("--max-num-seqs")
    assert "rows" not in names(
        varied(reading, fast, {"limits.max_num_seqs": 4096, "steps.rows": 4096.0})
    )


def test_only_options_that_narrow_are_named() -> None:
    """On a server in int4 nothing is left to round; one in int8 may still go to int4."""
    int4 = {"--quantization int8": 165e6, "--quantization int4": 110e6}
    low = {**FEW, "weights.choices": int4, "steps.decode": steps(0.038, 190e6, 3 * 0.5e9)}
    in_int4 = varied(HEALTHY, low, {"weights.step_bytes": 110e6})
    assert not {"weight-bytes", "wide-weights"} & set(names(in_int4))
    in_int8 = varied(HEALTHY, low, {"weights.step_bytes": 165e6})
    (advice,) = [each for each in list_findings(in_int8) if each.name == "weight-bytes"]
    assert advice.what_if == "quantization=int4"
    assert [line for line in advice.evidence if "int8" in line] == []
    in_bf16 = varied(HEALTHY, FEW)
    (advice,) = [each for each in list_findings(in_bf16) if each.name == "weight-bytes"]
    assert advice.what_if == "quantization=int4"
    int8, int4 = advice.evidence[-2:]
    assert int8.startswith("--quantization int8: a step reads") and "int4" in int4
    products_s = 3 * 0.5e9 / FLOPS
    floor_s = max((WEIGHTS / 3 + 80e6) / BANDWIDTH, products_s)
    saved = ((WEIGHTS + 80e6) / BANDWIDTH - floor_s) / 0.038
    assert advice.share == pytest.approx(in_bf16.decode_share * saved, rel=1e-3)


def test_nothing_is_known_of_an_empty_reading() -> None:
    """Unknown is not zero: no rule may hold, and nothing may divide by it."""
    result = diagnose(ServerReading(source="metrics", subject="nobody"))
    assert result.bottleneck.name == "healthy" and result.findings == []
    assert result.waste == [] and result.savings == []


def test_decode_is_judged_before_any_request_has_ended() -> None:
    """Answers of thousands of tokens end in no window; gaps and steps are known all the same."""
    ended = ("ttft", "tpot", "e2e", "queue", "prefill")
    none = {f"latency.{name}": Percentiles() for name in ended}
    result = diagnose(varied(HEALTHY, none, {"lengths.output": Percentiles()}))
    (weights,) = [each for each in result.findings if each.name == "weight-bytes"]
    assert result.bottleneck.name == "weight-bytes" and weights.share > 0.1
    assert result.tpot.mean_s == pytest.approx(0.04), "of the gaps"


@pytest.mark.parametrize(
    "module",
    ["reading", "symptoms", "remedies", "rules", "waste", "diagnosis", "words"],
)
def test_rules_do_no_io(module: str) -> None:
    source = (ROOT / "src" / "headway" / "advise" / f"{module}.py").read_text(encoding="utf-8")
    allowed = {"dataclasses", "collections", "headway", "msgspec"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in allowed
        assert not (isinstance(node, ast.Name) and node.id in ("open", "print", "input"))


# ── the arithmetic of bounds ────────────────────────────────────────────────────────────────────


def test_more_rows_cost_their_kv_until_products_bind() -> None:
    step = decode_step(varied(HEALTHY, FEW))
    assert step is not None
    assert step.floor_s() == pytest.approx(0.0341, abs=1e-4), "the docstring's example"
    assert step.with_rows(6) == pytest.approx(0.0432, abs=1e-4)
    assert step.floor_s(rows=100) == pytest.approx(100 * 0.5e9 / FLOPS)
    assert step.speedup(6) == pytest.approx(2 * 0.038 / 0.0432, rel=1e-2)
    assert step.speedup(3) == 1


def test_a_floor_is_never_undercut() -> None:
    """A measured step below its own floor (a stale ceiling) must not promise negative time."""
    step = decode_step(varied(HEALTHY, FEW, {"steps.decode": steps(0.01, WEIGHTS, 1e9)}))
    assert step is not None
    assert step.floor_s() == pytest.approx(step.seconds), "the machine can do what it did"
    assert step.with_rows(6) >= step.floor_s(6) > 0


def test_cache_resident_models_have_no_floor() -> None:
    resident = varied(HEALTHY, {"weights.cache_resident": True})
    assert decode_step(resident) is None
    reason = diagnose(resident).tpot.why_no_floor
    assert "cache" in reason


def test_those_that_still_wait_count_as_waiting() -> None:
    """Ten waited 1 s and are done, ten have waited 11 s: 6 s, not 1."""
    waiting = {"latency.queue": all_at(1.0, count=10), "load.waiting_ages_s": (11.0,) * 10}
    reading = varied(HEALTHY, waiting)
    assert reading.queue_s == pytest.approx(6.0)


def test_savings_in_seconds_and_dollars() -> None:
    """A fifth of 101 tokens at 5 requests/s and $5 a million: 20.2 · 5 · 3600 · 5e-6 = $1.82."""
    spend = SpendReading(price_per_hour=2.0, usd_per_million_output=5.0, usd_per_million_input=1.0)
    result = diagnose(varied(HEALTHY, {"spend": spend})).savings
    outputs, prompts, prefix = result
    assert outputs.seconds == pytest.approx(0.2 * 4.0)
    assert outputs.usd_per_hour == pytest.approx(1.818)
    assert outputs.note == "output length is a product decision"
    assert prompts.seconds == pytest.approx(0.2 * 0.045)
    assert prefix.seconds == pytest.approx(0.5 * 0.045) and "prefix cache" in prefix.note


def test_a_known_prefix_takes_the_place_of_the_assumed_half() -> None:
    prefix = diagnose(varied(HEALTHY, LONG, {"prefix.shared_tokens": 1000.0})).savings[-1]
    assert prefix.what.startswith("a stable prefix of 25%")
    assert prefix.seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (QUEUED, "TTFT is 99% queueing: quantization"),
        ({}, "more KV memory buys nothing"),
        ({}, "a higher --max-num-seqs buys nothing"),
        ({}, "99% decode: shorter prompts"),
        (LONG | {"lengths.output": all_at(3)}, "prefill: speculative decoding"),
        ({"steps.idle_share": 0.9}, "more replicas"),
        ({"steps.host_share": 0.6}, "int8 weights or a faster accelerator"),
        ({"client.slow_streams": (SLOW,)}, "no flag of the server"),
    ],
)
def test_what_would_be_a_waste(changes: dict[str, Any], words: str) -> None:
    waste = diagnose(varied(HEALTHY, changes)).waste
    assert any(words in text for text in waste), waste


def test_a_waste_is_not_named_where_it_would_help() -> None:
    waste = " ".join(diagnose(varied(HEALTHY, CASES["kv-capacity"][0])).waste)
    assert "KV memory" not in waste and "--max-num-seqs" not in waste


def test_full_kv_is_told_of_narrower_kv() -> None:
    choices = {"--kv-cache-dtype int8": 6_000}
    full = {**CASES["kv-capacity"][0], "kv.bytes_per_token": 12_000, "kv.choices": choices}
    evidence = diagnose(varied(HEALTHY, full)).findings[0].evidence
    assert "--kv-cache-dtype int8: 2.0 times the tokens" in evidence, evidence


def test_words() -> None:
    assert [duration(s) for s in (None, 0.0004, 0.0123, 0.25, 1.5, 90)] == [
        *("–", "0.40 ms", "12.3 ms", "250 ms", "1.5 s", "90 s")
    ]
    assert [dollars(5.555), dollars(0.000123)] == ["$5.55", "$0.00012"]
    assert [plural(1, "row"), plural(2.6, "row")] == ["1 row", "2.6 rows"]
    assert rate(17.2e9, "B/s") == "17.2 GB/s"


def test_the_page_has_the_table() -> None:
    """docs/doctor.md is written by `python -m headway.advise.reference`."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert page == reference.with_table(page)
