"""A runtime that holds steps as a device does, an engine that plans ahead of it, and random plans.

`LateExecutor` takes steps and runs none before it is collected: `FakeExecutor` then checks them one
behind the other, as a stream would run them. `play` runs one list of operations at some depth.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine_world import EOS, VOCAB, World
from fakes import FakeExecutor, make_settings
from headway.config.parallel import Parallel
from headway.config.resolve import Settings
from headway.core.plan import GrammarMasks, StepPlan, StepResult, run, sampled_in

STAGES = ("submit", "sample", "collect")


@dataclass
class LateExecutor:
    """Steps in flight over a checking executor; `fail_at` names the stage that raises once.

    A step whose `collect` raises was done before, or not at all.
    """

    checking: FakeExecutor
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    fail_at: str = ""
    queue: deque[tuple[StepPlan, GrammarMasks]] = field(default_factory=deque)
    most_held: int = 0
    num_placeholders: int = 0
    num_abandoned: int = 0
    plan: StepPlan | None = None
    sampled: dict[int, int] = field(default_factory=dict)
    """By sequence id the step that sampled it last."""
    failed: set[int] = field(default_factory=set)

    def submit(self, plan: StepPlan) -> None:
        self._break("submit")
        self.plan = plan
        self.checking.had_drafts |= any(row.num_drafts for row in plan.scheduled)

    def sample(self, step: int, masks: GrammarMasks) -> None:
        assert self.plan is not None and self.plan.step == step
        self._break("sample")
        self.queue.append((self.plan, masks))
        self.plan = None
        self.most_held = max(self.most_held, len(self.queue))

    def collect(self) -> StepResult:
        plan, masks = self.queue.popleft()
        if self.fail_at == "collect" and self.queue and self.rng.random() < 0.5:
            self._run(plan, masks)  # the device was through, and the host was not told
        self._break("collect")
        result = run(self.checking, self._resolved(plan), masks)
        self.failed |= result.failed.keys()
        self.sampled |= {sample.sequence_id: plan.step for sample in result.samples}
        return result

    def abandon(self) -> None:
        self.num_abandoned += 1
        self.queue.clear()

    def _run(self, plan: StepPlan, masks: GrammarMasks) -> None:
        """Do what a step does to memory, and tell nobody."""
        self.checking.submit(self._resolved(plan))
        self.checking.sample(plan.step, masks)

    def _resolved(self, plan: StepPlan) -> StepPlan:
        """The plan with tokens for placeholders; of a sequence that failed nothing is computed."""
        self.failed -= set(plan.finished)
        rows = []
        for row in plan.scheduled:
            if row.sequence_id in self.failed:
                continue
            if row.token_ids[0] < 0:
                self.num_placeholders += 1
                assert row.token_ids == [sampled_in(self.sampled[row.sequence_id])]
                row = replace(row, token_ids=self.checking.sequences[row.sequence_id].tokens[-1:])
            assert min(row.token_ids) >= 0
            rows.append(row)
        copies = [copy for copy in plan.copies if copy.sequence_id not in self.failed]
        return replace(plan, scheduled=rows, copies=copies)

    def _break(self, stage: str) -> None:
        if self.fail_at == stage:
            self.fail_at = ""
            raise RuntimeError(f"told to fail in {stage}")

    def describe(self):
        return self.checking.describe()

    def probe(self, budget_s: float) -> None:
        pass


class LateWorld(World):
    """A world whose engine may be some steps ahead; each record is compared with its own plan."""

    def __init__(self, settings: Settings, guesses: random.Random | None = None) -> None:
        self.plans: dict[int, StepPlan] = {}
        self.may_fail = False
        super().__init__(settings, guesses)
        schedule = self.engine.scheduler.schedule

        def keep() -> StepPlan:
            plan = schedule()
            self.plans[plan.step] = plan
            return plan

        self.engine.scheduler.schedule = keep

    def over(self, executor: FakeExecutor) -> LateExecutor:
        self.late = LateExecutor(executor)
        return self.late

    def step(self):
        guessed, kept = self._guessed()
        updates, record = self.engine.step()
        self.num_steps += 1
        self._check_plan(self.plans.pop(record.step), record)
        self._take(updates)
        now_guessed, now_kept = self._guessed()
        if not self.may_fail:  # guesses beside a row that failed are verified for nobody
            self._check_drafts(updates, record, now_guessed - guessed, now_kept - kept)
        failed = {update.request_id for update in updates if update.finish_reason == "error"}
        poisoned = {r for r, request in self.requests.items() if self.is_poison(request)}
        assert failed <= poisoned or self.may_fail
        assert len(self.engine.scheduler.overlap.steps) <= self.engine.scheduler.overlap.depth
        assert min(record.schedule_s, record.execute_s, record.update_s, record.gap_s) >= 0
        self.engine.check_integrity()
        return updates, record

    def check_end(self) -> None:
        super().check_end()
        assert not self.late.queue and not self.engine.scheduler.overlap.steps


def random_settings(rng: random.Random, depth: int, stages: int) -> Settings:
    """Little memory, any windows, each policy; some with host memory, some with a prefix cache."""
    windows = rng.choice([(), (), (0,), (0, 6), (3,), (17, 1), (9, 0)])
    groups = max(len(windows), 1)
    more: dict = {"prefix_cache": rng.choice(["", "lfu", "lru"])}
    if rng.random() < 0.5:
        more |= {"host_blocks": (rng.choice([8, 64]),) * groups, "block_bytes": (1,) * groups}
    return make_settings(
        block_size=rng.choice([1, 2, 4, 5, 16]),
        num_blocks=tuple(rng.randint(4, 24) for _ in range(groups)),
        windows=windows,
        max_model_len=rng.randint(8, 48),
        max_num_seqs=rng.randint(1, 8),
        budget=rng.randint(8, 40),
        policy=rng.choice(["fcfs", "priority", "fair", "slo"]),
        overlap=depth,
        parallel=Parallel(stages=stages),
        **more,
    )


def random_operations(rng: random.Random) -> list[tuple]:
    """Requests, steps, aborts, preemptions, steps that raise and rows that fail, in any order."""
    operations: list[tuple] = []
    begins = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    for _ in range(rng.randint(4, 30)):
        match rng.choice(["add", "add", "step", "step", "step", "abort", "preempt", "bad"]):
            case "add":
                tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
                operations.append(("add", rng.choice([[], *begins]) + tail, random_sampling(rng)))
            case "step":
                operations.append(("step", rng.randint(1, 6)))
            case "abort":
                operations.append(("abort", rng.randrange(30), rng.choice([None, 0, 1])))
            case "preempt":
                operations.append(("preempt", rng.randrange(8)))
            case "bad" if rng.random() < 0.5:
                rows = frozenset(rng.sample(range(4), rng.randint(1, 2)))
                operations.append(rng.choice([("raise", rng.choice(STAGES)), ("fail", rows)]))
    return operations


def random_sampling(rng: random.Random) -> dict:
    """Several sequences, ends by length or by a token, and penalties, which nobody may foresee."""
    sampling: dict = {"n": rng.choice([1, 1, 1, 2, 3]), "ignore_eos": rng.random() < 0.5}
    sampling["max_tokens"] = rng.choice([1, 2, 3, rng.randint(1, 24)])
    sampling["min_tokens"] = rng.randint(0, min(3, sampling["max_tokens"]))
    if rng.random() < 0.3:
        sampling[rng.choice(["presence_penalty", "frequency_penalty"])] = 0.5
    if rng.random() < 0.3:
        sampling["stop_token_ids"] = [rng.randrange(VOCAB), EOS]
    if rng.random() < 0.2:
        sampling |= {"logprobs": 1}
    if rng.random() < 0.2:
        sampling |= {"prompt_logprobs": 0}
    return sampling


def perform(world: LateWorld, operation: tuple) -> None:
    """Do one operation."""
    scheduler = world.engine.scheduler
    match operation:
        case ("add", prompt, sampling):
            world.add(prompt[: world.settings.max_model_len - 1], **sampling)
        case ("step", count):
            for _ in range(count if world.engine.has_work else 0):
                world.step()
        case ("abort", number, index) if world.requests:
            world.abort(number % len(world.requests), index)
        case ("preempt", number) if scheduler.running:
            victim = scheduler.running[number % len(scheduler.running)]
            if victim.state == "running":
                scheduler.preempt(victim)
                world.engine.check_integrity()
        case ("raise", stage):
            world.late.fail_at = stage
            world.step()
        case ("fail", rows):
            world.executor.fail_rows, world.may_fail = rows, True
            world.step()


def play(seed: int, depth: int, stages: int = 1) -> LateWorld:
    """A random world of this number at this depth, run to its end, where its truth is checked."""
    rng = random.Random(seed)
    settings, operations = random_settings(rng, depth, stages), random_operations(rng)
    world = LateWorld(settings, random.Random(seed) if rng.random() < 0.3 else None)
    delays = random.Random(seed)
    world.executor.delay = lambda: delays.choice([0, 0, 1, 3])
    if rng.random() < 0.1:
        world.executor.poison = rng.randrange(1, VOCAB)  # 0 is the engine's own trial
        world.executor.poisoned_stage = rng.choice(STAGES)
        operations = [each for each in operations if each[0] not in ("raise", "fail")]
    for operation in operations:
        perform(world, operation)
    world.drain()
    return world
