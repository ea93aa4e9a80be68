"""The verdict on made-up windows: which bound is named, and that it shows its evidence."""

from dataclasses import replace

import msgspec
import pytest

from headway.telemetry.contention import CoreUse
from headway.telemetry.verdict import KINDS, THRESHOLDS, Facts, judge_window

OTHERS = CoreUse(
    seconds=10, num_cores=2, steal_share=0.0, others_share=0.45, idle_share=0.01, run_queue=2.0
)
ALONE = CoreUse(
    seconds=10, num_cores=2, steal_share=0.0, others_share=0.03, idle_share=0.1, run_queue=1.2
)
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
replaced = msgspec.structs.replace
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
    ("long steps far from the ceilings start no small operations", "bandwidth",
     {"roofline": 0.1, "host_share": 0.03, "step_s": 0.4}),
    ("slow kernels, decode", "bandwidth", {}),
    ("others on the cores", "contention",
     {"roofline": 0.05, "host_share": 0.03, "cores": OTHERS}),
    ("others, and a queue for blocks", "contention",
     {**QUEUE, "kv_usage_max": 1.0, "cores": OTHERS}),
    ("others, and hardly any load", "contention", {"idle_share": 0.9, "cores": OTHERS}),
    ("others on cores that are free", "bandwidth",
     {"cores": replaced(OTHERS, idle_share=0.5, run_queue=0.7)}),
    ("nobody else", "host", {"host_share": 0.6, "cores": ALONE}),
    ("stolen", "contention", {"cores": replaced(ALONE, steal_share=0.2)}),
    ("a little stolen", "bandwidth", {"cores": replaced(ALONE, steal_share=0.06)}),
    ("a little stolen, and slow probes", "contention",
     {"cores": replaced(ALONE, steal_share=0.06), "probe_share": 0.4}),
    ("slow probes alone", "bandwidth", {"cores": ALONE, "probe_share": 0.4}),
    ("slow probes where /proc says nothing", "bandwidth", {"probe_share": 0.4}),
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


def test_contention_says_who_and_how_much():
    found = judge_window(replace(BUSY, cores=OTHERS, probe_share=0.5))
    assert found.text == "Other processes use the cores that the model needs."
    assert [e.text for e in found.evidence] == [
        "other processes used 45% of the cores' time",
        "4.0 tasks for 2 cores",
        "other virtual machines took 0%",
        "the last probes reached 50% of the best",
    ]
    stolen = judge_window(replace(BUSY, cores=replaced(ALONE, steal_share=0.3)))
    assert stolen.text.startswith("Other virtual machines use")
    assert stolen.evidence[0].text == "other virtual machines took 30%"


def test_every_kind_is_reached():
    assert {kind for _, kind, _ in CASES} == set(KINDS)


def test_launching_is_told_apart_from_gaps():
    """Long forwards far from the roofline with a quick host are not "waiting for the host"."""
    assert "waits for the host" in judge_window(replace(BUSY, host_share=0.6)).text
    assert "small operations" in judge_window(replace(BUSY, roofline=0.02, mbu=None)).text
