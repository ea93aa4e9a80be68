"""Simulated servers for tests: a truth that is a formula, traffic that is drawn, no machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from fakes import make_settings
from headway.advise.simulate.cores import SharedCores
from headway.advise.simulate.front import NO_FRONT, FrontendTimes
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.replica import ServerSetup, SimulatedReplica
from headway.advise.simulate.truth import MeasuredRange
from headway.bench.prompts import GeneratedPiece, IdWriter
from headway.bench.workload import Conversation, Turn
from headway.cli.common import model_folder
from headway.config.options import EngineOptions
from headway.config.resolve import Settings
from headway.core.plan import Description
from headway.core.service import ServiceClass, UnloadedTimes, service_classes
from headway.perf.frontend import HostCost
from headway.perf.model import Work
from headway.planning import plan_settings
from headway.spec import read_model_spec
from headway.telemetry.calibration import MachineCalibration, StepColumns, fingerprint

MOST = 2**40
SPEC = read_model_spec(model_folder(None))


@dataclass
class Formula:
    """Steps of `step_s` and `token_s` for each token."""

    step_s: float
    token_s: float = 0.0
    label: str = "formula"
    reach: MeasuredRange = field(default_factory=lambda: MeasuredRange((MOST,) * 4))

    def seconds(self, work: Work) -> float:
        return self.step_s + self.token_s * work.num_tokens if work.num_tokens else 1e-6


def served(
    *, classes: dict[str, ServiceClass] | None = None, max_queue_wait_s: float | None = None, **how
) -> ServerSetup:
    """A server with these settings; 20,000 KV tokens and rows for all unless they say less."""
    shape = {"num_blocks": (1251,), "block_size": 16, "max_num_seqs": 64, "budget": 512}
    settings = make_settings(**{**shape, "max_model_len": 2048, "policy": "fcfs", **how})
    return ServerSetup(
        spec=SPEC,
        settings=settings,
        description=Description(device="cpu"),
        classes=classes or service_classes(),
        max_queue=10**6,
        max_queue_wait_s=max_queue_wait_s,
    )


def world(
    truth: Formula, wanted: ServerSetup, *, replicas=1, front: FrontendTimes = NO_FRONT, **clients
) -> World:
    made = [SimulatedReplica(wanted, truth) for _ in range(replicas)]
    return World(made, front, IdWriter(0), Clients(**clients), seed=1)


def talks(times, *, prompt=8, answer=1, turns=1, think_s=0.0, name="default"):
    """A conversation at each time, prompts of their own."""
    return [
        Conversation(
            at_s=float(at_s),
            service_class=name,
            turns=tuple(
                Turn(
                    prompt=(GeneratedPiece(f"request {i} {k}", prompt),),
                    output_tokens=answer,
                    think_s=think_s if k else 0.0,
                )
                for k in range(turns)
            ),
        )
        for i, at_s in enumerate(times)
    ]


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()


def steady_steps(count: int = 400) -> StepColumns:
    """20 ms and 0.05 ms a token, without noise: decodes of 1 to 32 rows, some with a chunk."""
    rng, result, now_s = np.random.default_rng(0), StepColumns(), 0.0
    for _ in range(count):
        rows, chunk = int(rng.integers(1, 33)), int(rng.choice([0, 0, 64, 256]))
        read = rows * int(rng.integers(50, 400))
        result.seconds.append(0.02 + 5e-5 * (rows + chunk))
        result.started_s.append(now_s)
        result.tokens.append(rows + chunk)
        result.sampled.append(rows)
        result.attended.append(read)
        result.read.append(read)
        now_s += result.seconds[-1]
    return result


NAMES = ("started_s", "seconds", "tokens", "sampled", "attended", "read", "engine")


def two_engines(
    expected_s: Callable[[Work], float], interference: float, count: int = 1500
) -> StepColumns:
    """Steps of two engines that begin whenever, by the simulator's own rule: each takes what is
    expected, 5% more or less, and for each other in a step that share longer."""
    rng = np.random.default_rng(4)
    cores = SharedCores(replace(NO_FRONT, interference=interference or 1e-9), threads=1, engines=2)
    result, begun, due, now_s = StepColumns(), dict[int, tuple[float, Work]](), [0.0, 1e-3], 0.0
    while len(result) < count:
        for engine in begun:
            due[engine] = cores.ends_s(engine, now_s)
        now_s, engine = min((at_s, engine) for engine, at_s in enumerate(due))
        if engine not in begun:
            rows, chunk = int(rng.integers(1, 33)), int(rng.choice([0, 0, 64, 256]))
            work = Work(rows + chunk, rows, 300 * rows, 300 * rows)
            begun[engine] = now_s, work
            cores.begin(engine, now_s, expected_s(work) * rng.normal(1, 0.05))
            continue
        began_s, work = begun.pop(engine)
        cores.end(engine, now_s)
        due[engine] = now_s + float(rng.choice([1e-4, 2e-2]))
        for name, value in zip(NAMES, (began_s, now_s - began_s, *work, engine), strict=True):
            getattr(result, name).append(value)
    return result


def measured(settings: Settings, **more) -> MachineCalibration:
    """What a server with these settings tells of such steps."""
    return MachineCalibration(
        headway="1",
        model="tiny",
        fingerprint=fingerprint(SPEC),
        description=Description(device="cpu"),
        settings=settings.to_stats(),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.cache.block_size,
        group_blocks=[count - 1 for count in settings.cache.num_blocks],
        vocab_size=SPEC.vocab_size,
        alone=UnloadedTimes(),
        steps=steady_steps(),
        host=HostCost(),
        **more,
    )


def measured_here(options: EngineOptions) -> MachineCalibration:
    """The same of a server that these options start on this machine, with 20,000 KV tokens."""
    _, settings, _, _ = plan_settings(model_folder(None), options)
    return msgspec.structs.replace(measured(settings), group_blocks=[1250])
