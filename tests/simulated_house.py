"""Simulated servers for tests: a truth that is a formula, traffic that is drawn, no machine."""

from dataclasses import dataclass, field

import numpy as np

from fakes import make_settings
from headway.advise.simulate.front import NO_FRONT, Front
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.replica import Replica, Served
from headway.advise.simulate.truth import Reach
from headway.bench.prompts import IdWriter, Made
from headway.bench.workload import Conversation, Turn
from headway.cli.common import model_folder
from headway.core.model_spec import read_model_spec
from headway.core.plan import Description
from headway.core.service import ServiceClass, service_classes
from headway.engine.cost import Work

MOST = 2**40
SPEC = read_model_spec(model_folder(None))


@dataclass
class Formula:
    """Steps of `step_s` and `token_s` for each token."""

    step_s: float
    token_s: float = 0.0
    label: str = "formula"
    reach: Reach = field(default_factory=lambda: Reach((MOST,) * 4))

    def seconds(self, work: Work) -> float:
        return self.step_s + self.token_s * work.num_tokens if work.num_tokens else 1e-6


def served(
    *, classes: dict[str, ServiceClass] | None = None, max_queue_wait_s: float | None = None, **how
) -> Served:
    """A server with these settings; 20,000 KV tokens and rows for all unless they say less."""
    shape = {"num_blocks": (1251,), "block_size": 16, "max_num_seqs": 64, "budget": 512}
    settings = make_settings(**{**shape, "max_model_len": 2048, "policy": "fcfs", **how})
    return Served(
        spec=SPEC,
        settings=settings,
        description=Description(device="cpu"),
        classes=classes or service_classes(),
        max_queue=10**6,
        max_queue_wait_s=max_queue_wait_s,
    )


def world(
    truth: Formula, wanted: Served, *, replicas=1, front: Front = NO_FRONT, **clients
) -> World:
    made = [Replica(wanted, truth) for _ in range(replicas)]
    return World(made, front, IdWriter(0), Clients(**clients), seed=1)


def talks(times, *, prompt=8, answer=1, turns=1, think_s=0.0, name="default"):
    """A conversation at each time, prompts of their own."""
    return [
        Conversation(
            at_s=float(at_s),
            service_class=name,
            turns=tuple(
                Turn(
                    prompt=(Made(f"request {i} {k}", prompt),),
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
