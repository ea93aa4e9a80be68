"""An engine on a made-up machine, whose steps move a virtual clock by what they take there."""

from dataclasses import dataclass, field
from typing import NamedTuple

from fakes import FakeExecutor, make_settings
from headway.core.clock import VirtualClock
from headway.core.plan import Description, StepPlan
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.perf.model import Work


class Machine(NamedTuple):
    """A made-up machine: until the weights are read, further tokens cost nothing."""

    host_s: float = 0.001
    weights_s: float = 0.04
    token_s: float = 0.004
    head_s: float = 0.008
    sampled_s: float = 2e-4
    attended_s: float = 2e-7
    read_s: float = 3e-6

    def seconds(self, work: Work) -> float:
        head_s = self.head_s if work.num_sampled else 0.0
        return (
            self.host_s
            + max(self.weights_s, work.num_tokens * self.token_s)
            + head_s
            + work.num_sampled * self.sampled_s
            + work.attended_tokens * self.attended_s
            + work.kv_tokens_read * self.read_s
        )


@dataclass
class Timed(FakeExecutor):
    """The fake on a made-up machine: a step moves the virtual clock by what it takes there."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    machine: Machine = Machine()
    new_s: float = 0.0
    """Of each sequence that comes, whatever it computes."""

    def submit(self, plan: StepPlan) -> None:
        rows = [(row.start, len(row.token_ids)) for row in plan.scheduled]
        work = Work(
            sum(n for _, n in rows),
            sum(row.sample for row in plan.scheduled),
            sum(start + i + 1 for start, n in rows for i in range(n)),
            sum(start + n for start, n in rows),
        )
        if rows:
            self.clock.advance(self.machine.seconds(work) + self.new_s * len(plan.new))
        super().submit(plan)

    def describe(self) -> Description:
        return Description(device="fake")


def timed_engine(max_num_seqs=8, budget=128, policy="slo", **more) -> tuple[Engine, Timed]:
    given_settings = make_settings(
        policy=policy,
        max_model_len=600,
        max_num_seqs=max_num_seqs,
        budget=budget,
        block_size=16,
        num_blocks=(400,),
    )
    executor = Timed(16, (400,), 50, **more)
    engine = build_engine(
        executor, given_settings, vocab_size=50, eos_token_ids=(), clock=executor.clock
    )
    return engine, executor
