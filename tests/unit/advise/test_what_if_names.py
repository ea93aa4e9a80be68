"""Each what-if beside a simulation that was built by hand for the changed traffic or server.

The scene is a small server that has too much to do: four rows, a KV cache that holds four long
requests, prompts that share a beginning, guesses, and a queue. There every change is felt, which
the tests hold as well: a what-if that changed nothing would be found.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from fakes import make_settings
from headway.advise.simulate.front import FrontendTimes
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import calibrated_machine
from headway.advise.simulate.replica import ServerSetup, SimulatedReplica
from headway.advise.what_if.case import WhatIfCase, case_of, run
from headway.advise.what_if.changes import ROWS, parse_change
from headway.advise.what_if.compare import PresentCase
from headway.bench.prompts import GeneratedPiece, IdWriter
from headway.bench.workload import Conversation, Turn
from headway.config.resolve import Settings
from headway.config.speculation_config import SpeculationConfig
from headway.core.errors import UsageError
from headway.core.service import service_classes
from headway.spec.quantization import Quantization
from headway.telemetry.calibration import MachineCalibration
from headway.telemetry.traffic import Origin, TrafficRequest
from simulated_house import SPEC, measured, poisson

SHAPE = {
    "num_blocks": (161,),
    "block_size": 16,
    "max_num_seqs": 4,
    "budget": 256,
    "max_model_len": 2048,
    "policy": "slo",
    "late": "serve",
    "lane_share": 0.1,
    "long_prefill_s": 0.02,
    "aging_tokens": 4000,
    "speculation": SpeculationConfig(sources=("lookup",), num_speculative_tokens=2),
}
CLASSES = service_classes(["ttft=600ms,tpot=60ms"])
SEED, SCALE = 3, 1.0


def scene() -> list[TrafficRequest]:
    """Short and long prompts, half of which begin alike."""
    rng = np.random.default_rng(4)
    result = []
    for at_s in poisson(13, 90, seed=4):
        prompt = int(rng.choice([90, 150, 700]))
        cached = int(rng.choice([0, 48]))
        result.append(TrafficRequest(at_s, prompt, cached, int(rng.integers(8, 30)), 1, 64))
    return result


def calibration_file() -> MachineCalibration:
    settings = make_settings(**SHAPE)
    return measured(
        settings,
        traffic=scene(),
        acceptance={"lookup": [0.6, 0.3]},
        origin=Origin(spec=SPEC, settings=settings, classes=CLASSES),
    )


@dataclass(frozen=True, kw_only=True)
class Hand:
    """The changed world in plain words: fields of the settings, the traffic, the server."""

    settings: dict[str, Any] = field(default_factory=dict)
    traffic: list[TrafficRequest] = field(default_factory=scene)
    replicas: int = 1
    max_queue: int | None = None
    max_queue_wait_s: float | None = None
    quantization: str = "none"
    cache: dict[str, Any] = field(default_factory=dict)

    def built(self) -> Settings:
        result = make_settings(**{**SHAPE, **self.settings})
        if self.quantization != "none":
            result = replace(result, quantization=Quantization.of(self.quantization, packed=True))
        return replace(result, cache=replace(result.cache, **self.cache))

    def run(self) -> bytes:
        """The exchanges of its simulation, to the byte."""
        settings, calibration = self.built(), calibration_file()
        machine = calibrated_machine(calibration.model, SPEC, settings, calibration)
        served = ServerSetup(
            spec=SPEC,
            settings=settings,
            description=machine.description,
            classes=CLASSES,
            max_queue=self.max_queue,
            max_queue_wait_s=self.max_queue_wait_s,
            acceptance=(0.6, 0.3),
            belief=machine.belief,
        )
        replicas = [
            SimulatedReplica(served, machine.truth(SEED + 1000 * n, SCALE), seed=SEED + n)
            for n in range(self.replicas)
        ]
        limit = int(np.median([asked.limit or 0 for asked in self.traffic]))
        front = FrontendTimes.of(calibration.host)
        world = World(replicas, front, IdWriter(0, SPEC.vocab_size), Clients(answer_limit=limit),
                      SEED)  # fmt: skip
        return msgspec.json.encode(world.run([talk(n, a) for n, a in enumerate(self.traffic)]))


def talk(number: int, asked: TrafficRequest) -> Conversation:
    """What all share of its prompt, and what is its own."""
    shared = (GeneratedPiece("shared", asked.cached),) if asked.cached else ()
    own = (GeneratedPiece(f"request {number}", asked.prompt - asked.cached),)
    turn = Turn(system=shared, prompt=own, output_tokens=asked.answer or 1)
    return Conversation(at_s=asked.at_s, turns=(turn,), service_class=asked.service_class)


def asked(**changed: Any) -> list[TrafficRequest]:
    """The traffic with fields that are functions of each request."""
    return [
        msgspec.structs.replace(one, **{name: of(one) for name, of in changed.items()})
        for one in scene()
    ]


FP32, INT8 = 64 * 2 * 4, 64 * 2 + 2 * 4
"""Bytes of a token's keys and values in a head of 64: 512, and 136 with a scale of 4 for each."""
BY_HAND = {
    "rate=2x": Hand(traffic=asked(at_s=lambda a: a.at_s / 2)),
    "prompts=1.2x": Hand(traffic=asked(prompt=lambda a: round(a.prompt * 1.2))),
    "answers=0.5x": Hand(
        traffic=asked(answer=lambda a: max(round(a.answer / 2), 1), limit=lambda a: 32)
    ),
    "prefix=80": Hand(traffic=asked(cached=lambda a: 80)),
    "replicas=2": Hand(replicas=2),
    "max_num_seqs=2": Hand(settings={"max_num_seqs": 2}),
    "max_num_batched_tokens=64": Hand(settings={"budget": 64}),
    "policy=fcfs": Hand(settings={"policy": "fcfs"}),
    "late=shed": Hand(settings={"late": "shed"}),
    "lane_share=0.5": Hand(settings={"lane_share": 0.5}),
    "long_prefill=20s": Hand(settings={"long_prefill_s": 20.0}),
    "aging=0.1x": Hand(settings={"aging_tokens": 400}),
    "kv_memory=0.5x": Hand(settings={"num_blocks": (81,)}),
    "kv=int8": Hand(
        settings={"num_blocks": (round(160 * FP32 / INT8) + 1,)}, cache={"dtype": "int8"}
    ),
    "quantization=int8": Hand(quantization="int8"),
    "block_size=32": Hand(settings={"num_blocks": (81,), "block_size": 32}),
    "prefix_cache=false": Hand(cache={"prefix_cache": ""}),
    "prefix_cache_policy=lfu": Hand(cache={"prefix_cache": "lfu"}),
    "speculative_method=off": Hand(settings={"speculation": SpeculationConfig()}),
    "max_queue=2": Hand(max_queue=2),
    "max_queue_wait=100ms": Hand(max_queue_wait_s=0.1),
}
UNFELT = {"prefix_cache_policy=lfu"}
"""Which block goes first changes nothing where one beginning is shared; the setting is compared."""


@pytest.fixture(scope="module")
def case() -> WhatIfCase:
    return case_of(calibration_file())


@pytest.fixture(scope="module")
def present(case: WhatIfCase) -> bytes:
    return exchanges(case)


def exchanges(case: WhatIfCase) -> bytes:
    return msgspec.json.encode(run(case, case.machinery(), SEED, SCALE))


def test_every_name_is_built_by_hand():
    aliases = {"kv": "kv_cache_dtype"}
    names = [text.partition("=")[0] for text in BY_HAND]
    assert [aliases.get(name, name) for name in names] == sorted(
        (aliases.get(name, name) for name in names), key=list(ROWS).index
    )
    assert {aliases.get(name, name) for name in names} == ROWS.keys()


def test_the_present_is_the_scene(case: WhatIfCase, present: bytes):
    """And the scene is one in which there is something to feel: a queue, a share out of SLO."""
    assert present == Hand().run()
    now = PresentCase(case, runs=1).figures[0]
    assert 0.05 < now.in_slo < 0.95 and now.ttft_p99_s > 4 * now.ttft_p50_s / 3


@pytest.mark.parametrize("text", BY_HAND)
def test_a_what_if_is_the_simulation_of_the_changed_world(
    case: WhatIfCase, present: bytes, text: str
):
    then = parse_change(text).of(case)
    hand = BY_HAND[text].built()
    assert then.settings.cache == hand.cache
    assert then.settings.scheduler == hand.scheduler
    assert then.settings.quantization == hand.quantization
    result = exchanges(then)
    assert result == BY_HAND[text].run()
    assert (result != present) == (text not in UNFELT), "it is felt"


@pytest.mark.parametrize(
    ("times", "value"),
    [
        ("max_num_seqs=0.5x", "max_num_seqs=2"),
        ("max_num_batched_tokens=2x", "max_num_batched_tokens=512"),
        ("lane_share=5x", "lane_share=0.5"),
        ("long_prefill=50x", "long_prefill=1s"),
        ("aging=2x", "aging=8000"),
        ("block_size=2x", "block_size=32"),
        ("replicas=3x", "replicas=3"),
        ("prefix=2x", "prefix=96"),
    ],
)
def test_a_multiple_is_the_value_that_it_comes_to(case: WhatIfCase, times: str, value: str):
    assert parse_change(times).of(case) == parse_change(value).of(case)


def test_an_old_name_of_an_option_is_understood():
    assert parse_change("speculate=off") == parse_change("speculative_method=off")


def test_bytes_are_the_share_of_the_kv_that_they_are(case: WhatIfCase):
    """Half of 160 blocks of 16 tokens, six layers of one head each: 3,840 KiB."""
    num_bytes = 80 * 16 * 6 * FP32
    text = f"kv_memory={num_bytes // 1024}KiB"
    assert parse_change(text).of(case) == parse_change("kv_memory=0.5x").of(case)


def test_one_change_after_another_is_both(case: WhatIfCase):
    both = parse_change("max_num_seqs=2").of(parse_change("rate=2x").of(case))
    other = parse_change("rate=2x").of(parse_change("max_num_seqs=2").of(case))
    assert both == other
    hand = Hand(settings={"max_num_seqs": 2}, traffic=asked(at_s=lambda a: a.at_s / 2))
    assert exchanges(both) == hand.run()


def test_the_longest_request_must_fit(case: WhatIfCase):
    """Prompts of 700 with up to 29 tokens of an answer need 46 blocks; 40 are refused, 48 are not,
    and what no longer fits as a context is not promised."""
    with pytest.raises(UsageError, match="a request gets 640 tokens; one of the traffic has 7"):
        parse_change("kv_memory=0.25x").of(case)
    then = parse_change("kv_memory=0.3x").of(case)
    assert then.settings.max_model_len == 48 * 16


def test_so_many_servers_that_nobody_waits(case: WhatIfCase):
    """A what-if beyond reason ends where it must: each alone, none behind another."""
    alone = parse_change("rate=0.01x").of(case)
    many = parse_change("replicas=64").of(case)
    lonely, spread = (run(c, c.machinery(), SEED, SCALE) for c in (alone, many))
    tail = [np.percentile([x.chunk_s[0] - x.scheduled_s for x in result], 90)
            for result in (lonely, spread)]  # fmt: skip
    assert tail[1] == pytest.approx(tail[0], rel=0.35)
