"""10,000 plans of the scheduler, by a seed: `python tests/golden_plans.py` writes their hashes.

100 worlds of 100 steps each: an engine over an executor that computes nothing, random requests,
and a clock that each step moves on by a fixed time. The cost model does not learn, so a plan
follows from the scheduler alone. A world has one of the four policies, a rule of batching, and
random memory, windows, prefix cache, host memory, overlap, draft tokens, aborts and failed steps.
"""

import hashlib
import random
from collections import deque
from pathlib import Path

from msgspec.structs import astuple

from fakes import make_settings
from guessing import Guesser
from headway.config.parallel import Parallel
from headway.config.resolve import Settings
from headway.core.clock import VirtualClock
from headway.core.plan import Description, GrammarMasks, Sample, StepPlan, StepResult
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.core.terms import Terms
from headway.engine.build import build_engine
from headway.engine.sequence import Sequence
from headway.perf.model import Prior

RECORDED = Path(__file__).parent / "golden" / "plans.txt"
NUM_WORLDS, PLANS_PER_WORLD = 100, 100
MAX_REQUESTS = 24
POLICIES = ("slo", "slo", "fair", "priority", "fcfs")
BATCHING = ("continuous", "continuous", "continuous", "dynamic", "static")
VOCAB, EOS = 50, 7
STEP_S, TOKEN_S = 0.010137, 0.0010731
"""Seconds of a step, and of each of its tokens: odd numbers, so that no deadline is a tie."""
PRIOR = Prior(STEP_S, TOKEN_S, 6.3e-4, 8.7e-5, 5.1e-7, 9.9e-7)


def token_at(sequence_id: int, position: int) -> int:
    """Return the token that a sequence samples at `position`."""
    mixed = (sequence_id * 1_000_003 + position + 1) * 6_364_136_223_846_793_005
    return (mixed % 2**64 >> 33) % VOCAB


class TableExecutor:
    """An executor that samples `token_at`; a transfer ends some steps after it began."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fails = False
        self.steps: deque[StepPlan] = deque()
        self.transfers: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> None:
        self.fails, fails = False, self.fails
        if fails:
            raise RuntimeError("planted failure")
        self.steps.append(plan)
        for transfer in plan.transfers:
            if not transfer.is_spill:
                self.transfers[transfer.transfer_id] = self.rng.choice([0, 0, 1, 3])

    def sample(self, step: int, masks: GrammarMasks) -> None:
        pass

    def abandon(self) -> None:
        self.steps.clear()

    def collect(self) -> StepResult:
        plan = self.steps.popleft()
        samples = []
        for row in plan.scheduled:
            if row.sample:
                tokens, position = [], row.start + len(row.token_ids) - row.num_drafts
                for draft in [*row.drafts, -1]:
                    tokens.append(token_at(row.sequence_id, position + len(tokens)))
                    if tokens[-1] != draft:
                        break
                samples.append(Sample(row.sequence_id, tokens))
        done = [number for number, steps in self.transfers.items() if steps <= 0]
        self.transfers = {n: steps - 1 for n, steps in self.transfers.items() if steps > 0}
        return StepResult(plan.step, samples, transfers_done=done)

    def describe(self) -> Description:
        return Description(device="none")

    def probe(self, budget_s: float) -> None:
        pass


class Proposer(Guesser):
    """A speculator that drafts in some steps and not in others."""

    def is_due(self, num_decodes: int) -> bool:
        return self.rng.random() < 0.4

    def forget_owner(self, owner: bytes) -> None:
        pass


def random_settings(rng: random.Random, policy: str) -> Settings:
    """Return settings with so little memory that running requests are preempted at times."""
    size = rng.choice([2, 4, 8, 16])
    windows = rng.choice([(), (), (), (), (0, 6), (17, 0)])
    groups = max(len(windows), 1)
    more: dict = {"prefix_cache": rng.choice(["", "lru", "lfu", "cost"])}
    if rng.random() < 0.3:
        more |= {"host_blocks": (rng.choice([16, 64]),) * groups, "block_bytes": (1,) * groups}
    if rng.random() < 0.25:
        more |= {"overlap": 1, "parallel": Parallel(stages=rng.choice([1, 1, 2]))}
    return make_settings(
        block_size=size,
        num_blocks=tuple(rng.choice([220, 220, 400, 1200]) // size + 3 for _ in range(groups)),
        windows=windows,
        max_model_len=200,
        max_num_seqs=rng.choice([2, 6, 10, 16]),
        budget=rng.choice([8, 24, 64, 256]),
        policy=policy,
        batching=rng.choice(BATCHING),
        batch_window_s=0.0617,
        late=rng.choice(["serve", "shed"]),
        long_prefill_s=rng.choice([0.0253, 0.0811]),
        lane_share=rng.choice([0.1, 0.3]),
        aging_tokens=rng.choice([40, 300, 4000]),
        **more,
    )


def random_request(rng: random.Random, request_id: int, begins: list[list[int]]) -> Request:
    """Return a request of one of three users; many prompts begin alike."""
    tail = [
        rng.randrange(VOCAB)
        for _ in range(rng.choice([1, 5, rng.randint(1, 60), rng.randint(60, 150)]))
    ]
    max_tokens = rng.choice([1, 4, rng.randint(1, 30), rng.randint(20, 70)])
    sampling = SamplingParams(
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(3, max_tokens)),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.2 else [],
        logprobs=1 if rng.random() < 0.1 else None,
        presence_penalty=0.5 if rng.random() < 0.1 else 0.0,
    )
    terms = Terms(
        ttft_s=rng.choice([None, rng.uniform(0.02, 0.3), rng.uniform(0.2, 3.0)]),
        tpot_s=rng.choice([None, rng.uniform(0.012, 0.04), rng.uniform(0.03, 0.25)]),
        weight=rng.choice([0.5, 1.0, 3.0]),
        priority=rng.randint(-1, 1),
        idle_only=rng.random() < 0.2,
    )
    prompt = rng.choice([[], *begins]) + tail
    principal = Principal(rng.choice(["a", "a", "b", "c"]))
    return Request(request_id, prompt[:199], sampling, principal, terms=terms)


class PlannedWorld:
    """A seeded engine and the plans that it makes."""

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(number)
        settings = random_settings(rng, POLICIES[number % len(POLICIES)])
        self.executor = TableExecutor(random.Random(number))
        self.clock = VirtualClock()
        self.engine = build_engine(
            self.executor,
            settings,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            clock=self.clock,
            prior=PRIOR,
        )
        self.engine.cost.observe = lambda record: None  # type: ignore[method-assign]
        if rng.random() < 0.3:
            self.engine.scheduler.drafts.speculator = Proposer(rng, VOCAB, future_tokens)
        self.engine.scheduler.room.predicts_growth = (
            rng.random() < 0.6
        )  # else preemptions are common
        self.plans: list[StepPlan] = []
        self.num_requests = 0
        self.begins = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 40))] for _ in range(3)]
        schedule = self.engine.scheduler.schedule

        def record() -> StepPlan:
            plan = schedule()
            self.plans.append(plan)
            self.clock.advance(STEP_S + TOKEN_S * plan.num_tokens)
            return plan

        self.engine.scheduler.schedule = record  # type: ignore[method-assign]

    def play(self) -> list[StepPlan]:
        """Return the world's plans: requests come in bursts, some are aborted, few steps fail."""
        rng, arrivals = self.rng, self.rng.choice([0.1, 0.25, 0.5])
        fails, aborts = self.rng.random() < 0.2, self.rng.random() < 0.4
        while len(self.plans) < PLANS_PER_WORLD:
            while rng.random() < arrivals or not self.engine.num_requests:
                if self.engine.num_requests < MAX_REQUESTS:
                    self.add()
            if aborts and rng.random() < 0.03:
                self.engine.abort(rng.randrange(self.num_requests), rng.choice([None, None, 0]))
            self.executor.fails = fails and rng.random() < 0.02
            if not self.engine.has_work:
                self.engine.flush()
            self.engine.step()
        return self.plans[:PLANS_PER_WORLD]

    def add(self) -> None:
        """Add a request that arrives now."""
        request = random_request(self.rng, self.num_requests, self.begins)
        request.arrived_s = self.clock.now_s()
        self.num_requests += 1
        self.engine.add(request)


def future_tokens(sequence: Sequence) -> list[int]:
    """Return all tokens that a sequence will generate."""
    positions = range(sequence.num_prompt, sequence.max_len)
    return [token_at(sequence.sequence_id, position) for position in positions]


def digest(plans: list[StepPlan]) -> str:
    """Return a hash of all that the plans say of sequences and blocks."""
    hashed = hashlib.sha256()
    for plan in plans:
        new = [(one.sequence_id, one.token_ids, one.seed, one.dropped) for one in plan.new]
        transfers = [(t.group, t.blocks, t.host_blocks, t.direction) for t in plan.transfers]
        rows = [astuple(row) for row in plan.scheduled]
        copies = [astuple(copy) for copy in plan.copies]
        hashed.update(repr((plan.step, new, rows, plan.finished, copies, transfers)).encode())
    return hashed.hexdigest()[:16]


def digests() -> list[str]:
    """Return the hash of each world's plans, and one of all of these."""
    worlds = [digest(PlannedWorld(number).play()) for number in range(NUM_WORLDS)]
    return [*worlds, hashlib.sha256("".join(worlds).encode()).hexdigest()]


if __name__ == "__main__":
    RECORDED.write_text("\n".join(digests()) + "\n", encoding="utf-8")
