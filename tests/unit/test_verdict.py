"""The verdict on made-up windows: which bound is named, and that it shows its evidence."""

from dataclasses import replace

import pytest

from headway.telemetry.verdict import KINDS, THRESHOLDS, Facts, judge_window

BUSY = Facts(
    num_steps=1000,
    idle_share=0.05,
    gap_share=0.02,
    host_share=0.1,
    mfu=0.3,
    mbu=0.4,
    roofline=0.4,
    compute_side=False,
    cache_resident=False,
    running=8.0,
    max_num_seqs=64,
    waiting=0.0,
    kv_usage_max=0.3,
    num_preemptions=0,
)
QUEUE = {"waiting": 12.0}
CASES = [
    ("nothing ran", "under-loaded", {"num_steps": 0}),
    ("idle", "under-loaded", {"idle_share": 0.9, "running": 0.5}),
    ("idle between bursts, near a ceiling within them", "under-loaded",
     {"idle_share": 0.7, "mbu": 0.9}),
    ("prefill at the peak", "compute", {"mfu": 0.85, "roofline": 0.85, "compute_side": True}),
    ("decode at the bandwidth", "bandwidth", {"mbu": 0.8, "roofline": 0.8}),
    ("decode at the bandwidth, with a queue", "bandwidth", {"mbu": 0.8, **QUEUE, "running": 64.0}),
    ("both near: the higher one", "compute", {"mbu": 0.7, "mfu": 0.75}),
    ("above the ceiling", "bandwidth", {"mbu": 1.3, "roofline": 1.3}),
    ("blocks are gone", "capacity", {**QUEUE, "kv_usage_max": 0.99, "mbu": 0.2}),
    ("sent back again and again", "capacity", {"num_preemptions": 300, "kv_usage_max": 1.0}),
    ("rows are gone", "capacity", {**QUEUE, "running": 63.5}),
    ("tiny pool, tiny model", "capacity", {**QUEUE, "kv_usage_max": 1.0, "roofline": 0.01}),
    ("a queue with room left", "bandwidth", QUEUE),
    ("gaps", "host", {"gap_share": 0.5, "host_share": 0.6}),
    ("launching dominates", "host", {"roofline": 0.02, "mfu": 0.02, "mbu": None}),
    ("slow kernels, decode", "bandwidth", {}),
    ("slow kernels, prefill", "compute", {"compute_side": True, "mbu": None}),
    ("no probe", "unknown", {"mfu": None, "mbu": None, "roofline": None}),
]  # fmt: skip


@pytest.mark.parametrize(("why", "kind", "changes"), CASES, ids=[case[0] for case in CASES])
def test_verdicts(why, kind, changes):
    found = judge_window(replace(BUSY, **changes))
    assert found.kind == kind, found.text
    assert found.text.endswith(".")


def test_near_ceiling_is_said_only_there():
    assert judge_window(replace(BUSY, mbu=0.8)).near_ceiling
    assert not judge_window(BUSY).near_ceiling


def test_evidence_stands_beside_its_threshold():
    found = judge_window(replace(BUSY, **QUEUE, kv_usage_max=1.0))
    assert {e.name for e in found.evidence} >= {"waiting", "kv_usage"}
    assert all(e.threshold == THRESHOLDS[e.name] and e.text for e in found.evidence)
    waiting = next(e for e in found.evidence if e.name == "waiting")
    assert waiting.value == 12.0 > waiting.threshold


def test_every_kind_is_reached():
    assert {kind for _, kind, _ in CASES} == set(KINDS)


def test_launching_is_told_apart_from_gaps():
    """Long forwards far from the roofline with a quick host are not "waiting for the host"."""
    assert "waits for the host" in judge_window(replace(BUSY, host_share=0.6)).text
    assert "small operations" in judge_window(replace(BUSY, roofline=0.02, mbu=None)).text
