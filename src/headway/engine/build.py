"""Build an engine from its settings: the cache and its tiers, the cost model, the scheduler.

settings → KVCache → KVTransfers, tiers → policy, speculator → Scheduler → Engine
"""

from headway.config.resolve import Settings
from headway.core.clock import Clock, SystemClock
from headway.core.plan import Executor, OverlappingExecutor
from headway.engine.batching import BatchGate
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.engine.kv import KVCache
from headway.engine.kv.tiers import make_tiers
from headway.engine.kv_transfers import KVTransfers
from headway.engine.overlap import Overlap
from headway.engine.policy import make_policy
from headway.engine.recording import StepRecorder
from headway.engine.scheduler import Scheduler
from headway.engine.speculation import make_speculator
from headway.perf.model import Prior, StepModel


def build_engine(
    executor: Executor,
    settings: Settings,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    clock: Clock | None = None,
    grammars: Grammars | None = None,
    prior: Prior | None = None,
) -> Engine:
    """Return an engine over `executor`, whose step times begin with those of `prior`.

    Raises TypeError for settings that plan ahead of an executor that holds one step.
    """
    if settings.scheduler.overlap and not isinstance(executor, OverlappingExecutor):
        raise TypeError(f"{type(executor).__name__} holds one step at a time.")
    cost = StepModel(prior, settings.cache.reaches)
    scheduler = build_scheduler(settings, cost, clock or SystemClock())
    engine = Engine(
        executor,
        settings,
        scheduler,
        StepRecorder(scheduler, cost),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
    )
    cache = settings.cache
    if cache.prefix_cache and (cache.host_blocks or cache.disk_bytes):
        add_tiers(engine)
    return engine


def build_scheduler(settings: Settings, cost: StepModel, clock: Clock) -> Scheduler:
    """Return the scheduler of these settings, with its cache, policy and speculator."""
    cache, rules, chunk = settings.cache, settings.scheduler, settings.max_num_batched_tokens
    kv = KVCache(cache, chunk)
    blocks, block_bytes = cache.host_blocks, cache.block_bytes
    return Scheduler(
        kv,
        BatchGate(rules.batching, settings.max_num_seqs, rules.batch_window_s, clock),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=chunk,
        policy=make_policy(settings, cost, clock, kv),
        transfers=KVTransfers(kv, cost, host_blocks=blocks, block_bytes=block_bytes, chunk=chunk),
        clock=clock,
        speculator=make_speculator(settings.speculation, cost),
        overlap=Overlap(rules.overlap, stages=settings.parallel.stages),
    )


def add_tiers(engine: Engine) -> None:
    """Enable lower tiers of the prefix cache: host memory, disk, other engines."""
    transfers, settings = engine.scheduler.transfers, engine.settings
    engine.kv.tiers = make_tiers(
        engine.kv.pools,
        settings.cache,
        engine.cost,
        engine.clock,
        settings.max_num_batched_tokens,
        transfers.host,
        transfers.rate,
    )
