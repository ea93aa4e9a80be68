"""Goodput of the policies on a virtual clock: this engine, an executor that only counts seconds.

    python benchmarks/goodput_simulated.py [--rates 0.3 0.5 …] [--policies fcfs slo] [--requests N]

The mix is that of `goodput.py`: 80% chats (150 tokens in, 80 out), 15% with one system prompt of
1,500 tokens before, 5% of 4,000 tokens; Poisson. The seconds of a step are those of Qwen2.5-0.5B
in int8 on two cores without VNNI: 20 ms for the weights, 3 ms a token, 0.7 µs a token attended.
An hour of traffic takes seconds; the tables of real runs are in docs/slo.md.
"""

import argparse
import dataclasses
import random

from headway.core.cache_config import CacheConfig
from headway.core.clock import VirtualClock
from headway.core.plan import Description, GrammarMasks, Sample, StepPlan, StepResult
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.core.resolve import Settings
from headway.core.scheduler_config import SchedulerConfig
from headway.core.terms import Terms
from headway.engine.engine import Engine

WEIGHTS_S, TOKEN_S, ATTENDED_S, READ_S = 0.020, 3.0e-3, 0.7e-6, 0.5e-6
SYSTEM_TOKENS = 1500


class Timed:
    """An executor that samples token 5 and moves the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.result = StepResult(0, [])

    def submit(self, plan: StepPlan) -> None:
        attended = sum(
            len(row.token_ids) * (row.start + (len(row.token_ids) + 1) / 2)
            for row in plan.scheduled
        )
        read = sum(row.start + len(row.token_ids) for row in plan.scheduled)
        if plan.scheduled:
            self.clock.advance(
                WEIGHTS_S + TOKEN_S * plan.num_tokens + ATTENDED_S * attended + READ_S * read
            )
        samples = [Sample(row.sequence_id, [5]) for row in plan.scheduled if row.sample]
        self.result = StepResult(plan.step, samples)

    def sample(self, step: int, masks: GrammarMasks) -> None:
        pass

    def collect(self) -> StepResult:
        return self.result

    def describe(self) -> Description:
        return Description(device="none")

    def probe(self, budget_s: float) -> None:
        pass


@dataclasses.dataclass(slots=True, kw_only=True)
class Asked:
    """One request of the mix and what became of it."""

    kind: str
    request: Request
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0

    @property
    def in_slo(self) -> bool:
        if self.first_s is None:
            return False
        terms = self.request.terms
        ttft_s = self.first_s - self.request.arrived_s
        tpot_s = (self.last_s - self.first_s) / max(self.num_tokens - 1, 1)
        return ttft_s <= terms.ttft_s and tpot_s <= terms.tpot_s


def draw(rate: float, count: int, seed: int, scale: float) -> list[Asked]:
    """The requests of one run, in the order of arrival."""
    rng = random.Random(seed)
    system = [rng.randrange(6, 50_000) for _ in range(SYSTEM_TOKENS)]
    now_s, asked = 0.0, []
    for number in range(count):
        now_s += rng.expovariate(rate)
        kind = rng.choices(("chat", "system", "long"), (80, 15, 5))[0]
        length = 4000 if kind == "long" else max(10, int(rng.gauss(150, 40)))
        prompt = [rng.randrange(6, 50_000) for _ in range(length)]
        request = Request(
            number,
            system + prompt if kind == "system" else prompt,
            SamplingParams(
                max_tokens=max(5, int(rng.gauss(80, 25))), ignore_eos=True, temperature=0
            ),
            Principal(),
            arrived_s=now_s,
            terms=Terms(ttft_s=(10.0 if kind == "long" else 1.5) * scale, tpot_s=0.12 * scale),
        )
        asked.append(Asked(kind=kind, request=request))
    return asked


def serve(asked: list[Asked], scheduler: SchedulerConfig, *, max_num_batched_tokens: int) -> Engine:
    """Run all of `asked` to their ends."""
    clock = VirtualClock()
    settings = Settings(
        device="none",
        dtype="int8",
        load_format="dummy",
        attention_backend="none",
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=max_num_batched_tokens,
        cache=CacheConfig(num_blocks=(20_000,)),
        threads=1,
        seed=0,
        scheduler=scheduler,
    )
    engine = Engine(Timed(clock), settings, vocab_size=50_000, eos_token_ids=(1,), clock=clock)
    by_id = {one.request.request_id: one for one in asked}
    position = 0
    while position < len(asked) or engine.has_work:
        while position < len(asked) and asked[position].request.arrived_s <= clock.now_s():
            engine.add(asked[position].request)
            position += 1
        if not engine.has_work:
            clock.advance(asked[position].request.arrived_s - clock.now_s())
            continue
        updates, _ = engine.step()
        engine.take_refusals()
        for update in updates:
            one = by_id[update.request_id]
            one.num_tokens += len(update.token_ids)
            one.last_s = clock.now_s()
            if one.first_s is None:
                one.first_s = clock.now_s()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[0.3, 0.4, 0.5, 0.6, 0.8, 1.2])
    parser.add_argument("--policies", nargs="*", default=["fcfs", "fair", "slo"])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--lane-share", type=float, default=0.25)
    parser.add_argument("--late", default="serve")
    parser.add_argument("--budgets", type=int, nargs="*", default=[128, 512])
    options = parser.parse_args()
    print(f"{'rate':>5} {'policy':<10} {'in SLO':>7} {'goodput/s':>9}  chat  system  long")
    for rate in options.rates:
        for policy in options.policies:
            budgets = options.budgets if policy != "slo" else [512]
            for budget in budgets:
                asked = draw(rate, options.requests, 7, options.scale)
                serve(
                    asked,
                    SchedulerConfig(
                        policy=policy, lane_share=options.lane_share, late=options.late
                    ),
                    max_num_batched_tokens=budget,
                )
                good = sum(one.in_slo for one in asked)
                duration_s = asked[-1].request.arrived_s
                kinds = []
                for kind in ("chat", "system", "long"):
                    rows = [one for one in asked if one.kind == kind]
                    kinds.append(sum(one.in_slo for one in rows) / max(len(rows), 1))
                name = policy if policy == "slo" else f"{policy} {budget}"
                print(
                    f"{rate:5.2f} {name:<10} {good / len(asked):7.1%} {good / duration_s:9.3f}  "
                    + "  ".join(f"{share:4.0%}" for share in kinds),
                    flush=True,
                )


if __name__ == "__main__":
    main()
