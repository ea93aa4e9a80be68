"""Builder of the answer of `GET /stats` from a model's `Telemetry`: see `snapshot` for the fields.

`history` has a point for each second of the last five minutes, for a page that was just opened: the
sums of that second, and the latencies of the requests that ended in the 10 seconds up to it.
"""

from itertools import islice

import numpy as np

from headway.config.alternatives import kv_choices, weight_choices
from headway.config.memory_plan import with_open_blocks
from headway.core.plan import Description
from headway.core.records import NO_STEP, StepRecord
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import (
    WINDOWS_S,
    EngineLimits,
    EngineNow,
    HistoryPoint,
    KVGroup,
    MachineCeilings,
    ModelFacts,
    Now,
    Snapshot,
    StepPoint,
    Totals,
)
from headway.telemetry.windows import Slot, Slots

MAX_STEPS_SHOWN, MAX_REQUESTS_SHOWN = 200, 512
OF_STEP = [name for name in Now.__struct_fields__ if name in StepRecord.__struct_fields__]
"""Fields of `Now` that are copied from the last step."""


def take_snapshot(
    telemetry: Telemetry,
    status: str = "ready",
    more_windows_s: tuple[int, ...] = (),
    *,
    with_history: bool = False,
) -> Snapshot:
    """Return the whole answer; `status` is that of the engine's client."""
    telemetry.advance()
    telemetry.count_tokens()
    now_s, ready = telemetry.clock.now_s(), telemetry.ready
    return Snapshot(
        version=telemetry.version,
        time_s=telemetry.clock.wall_s(),
        now_s=now_s,
        uptime_s=now_s - telemetry.started_s,
        status=status,
        model=model_facts(telemetry),
        machine=machine(telemetry),
        kernels=dict(ready.description.kernels) if ready else {},
        limits=EngineLimits(
            max_num_seqs=ready.max_num_seqs if ready else 0,
            max_num_batched_tokens=ready.max_num_batched_tokens if ready else 0,
            block_size=ready.block_size if ready else 0,
        ),
        slo_target=telemetry.slo_target,
        price_per_hour=telemetry.price_per_hour,
        now=this_moment(telemetry, now_s),
        engines=[engine_now(telemetry, engine) for engine in range(telemetry.engines.num)],
        windows=[telemetry.window(seconds) for seconds in (*WINDOWS_S, *more_windows_s)],
        steps=[step_point(record) for record in telemetry.last_steps(MAX_STEPS_SHOWN)],
        totals=totals(telemetry),
        prefixes=telemetry.prompts.shared_prefixes,
        settings=dict(ready.settings) if ready else {},
        history=second_by_second(telemetry.slots, now_s) if with_history else [],
    )


def model_facts(telemetry: Telemetry) -> ModelFacts:
    """Return the dimensions of the model in the type in which it runs."""
    spec, dtype, ready = telemetry.spec, telemetry.work.dtype, telemetry.ready
    settings = ready.settings if ready else {}
    return ModelFacts(
        names=telemetry.names,
        architecture=spec.architecture,
        dtype=dtype,
        num_parameters=spec.num_parameters,
        max_model_len=ready.max_model_len if ready else spec.max_len,
        vocab_size=spec.vocab_size,
        weight_bytes=spec.weight_bytes(dtype),
        step_weight_bytes=telemetry.work.weight_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token(telemetry.work.kv_dtype),
        flops_per_token=spec.flops(1),
        weight_choices=weight_choices(settings, spec),
        kv_choices=kv_choices(settings, spec),
    )


def machine(telemetry: Telemetry) -> MachineCeilings:
    """Return the present ceilings of the machine."""
    ready, roof = telemetry.ready, telemetry.roof
    description = ready.description if ready else Description(device="")
    ceilings = roof.ceilings
    return MachineCeilings(
        device=description.device,
        name=description.name,
        bandwidth_bytes_per_s=ceilings.bandwidth_bytes_per_s or None,
        flops_per_s=ceilings.flops_per_s or None,
        flops_dtype=ceilings.flops_dtype,
        datasheet_bandwidth_bytes_per_s=ceilings.datasheet_bandwidth_bytes_per_s,
        datasheet_flops_per_s=ceilings.datasheet_flops_per_s,
        cache_bytes=ceilings.cache_bytes,
        cache_resident=roof.cache_resident,
        num_probes=ceilings.num_probes,
        raised=roof.raised,
    )


def this_moment(telemetry: Telemetry, now_s: float) -> Now:
    """Return running and waiting requests and the blocks they hold."""
    last = telemetry.engines.last
    return Now(
        num_requests=telemetry.num_live,
        requests=[t.live(now_s) for t in islice(telemetry.live, MAX_REQUESTS_SHOWN)],
        kv_groups=kv_groups(telemetry),
        engine_demand=telemetry.engines.demand.engines_needed,
        **{name: getattr(last, name) for name in OF_STEP},
    )


def engine_now(telemetry: Telemetry, engine: int) -> EngineNow:
    """Return the state of one engine."""
    last = telemetry.engines.last_of.get(engine, NO_STEP)
    return EngineNow(
        engine=engine,
        role=telemetry.engines.role_of(engine),
        ready=engine in telemetry.engines.ready,
        num_running=last.num_running,
        num_waiting=last.num_waiting,
        kv_usage=last.kv_usage,
    )


def kv_groups(telemetry: Telemetry) -> list[KVGroup]:
    """Return the KV groups with their blocks, summed over the engines."""
    spec, kv_dtype = telemetry.spec, telemetry.work.kv_dtype
    groups = with_open_blocks(spec.kv_groups, spec, telemetry.work.dtype, kv_dtype)
    nothing = (0,) * len(groups)
    used = telemetry.engines.last.group_blocks_used or nothing
    of_one = telemetry.ready.group_blocks if telemetry.ready else nothing
    total = [blocks * telemetry.engines.num for blocks in of_one]
    return [
        KVGroup(
            kind=group.kind,
            window=group.window,
            num_layers=len(group.layers),
            bytes_per_token=group.bytes_per_token(kv_dtype),
            block_bytes=group.slot_bytes,
            blocks_used=in_use,
            blocks_total=blocks,
        )
        for group, in_use, blocks in zip(groups, used, total, strict=True)
    ]


def totals(telemetry: Telemetry) -> Totals:
    """Return the counts since the start."""
    registry = telemetry.registry

    def total(name: str) -> int:
        return int(sum(registry.values[name].values()))

    return Totals(
        requests=telemetry.num_requests,
        finished=registry.counts("request_success"),
        errors=dict(telemetry.errors),
        validation_failures=registry.counts("validation_failures"),
        admission_rejections=registry.counts("admission_rejections"),
        client_retries=total("client_retries"),
        preemptions=total("num_preemptions"),
        engine_restarts=total("engine_restarts"),
        handovers=registry.counts("kv_handovers"),
        prompt_tokens=total("prompt_tokens"),
        generation_tokens=total("generation_tokens"),
        cached_tokens=total("prefix_cache_hits"),
        cache_saved_s=sum(registry.values["prefix_cache_saved_seconds"].values()),
        slo_met=total("slo_met"),
        slo_missed=telemetry.num_missed,
        usd=telemetry.usd,
    )


def step_point(record: StepRecord) -> StepPoint:
    """Return one step as a point of the timeline."""
    return StepPoint(
        record.step,
        record.started_s,
        record.duration_s,
        record.num_prefill_tokens,
        record.num_decode_tokens,
        record.num_running,
        record.num_waiting,
        record.kv_usage,
        record.predicted_s,
    )


def second_by_second(slots: Slots, now_s: float) -> list[HistoryPoint]:
    """Return one point for each complete second, oldest first."""
    slots_in_range, _ = slots.last(max(WINDOWS_S), now_s)
    by_second = {slot.second: slot for slot in slots_in_range if slot.second < int(now_s)}
    if not by_second:
        return []
    return [
        history_point(second, by_second.get(second), last_ten_seconds(by_second, second))
        for second in range(min(by_second), int(now_s))
    ]


def last_ten_seconds(by_second: dict[int, Slot], second: int) -> list[Slot]:
    """Return the slots of the 10 seconds up to `second`."""
    span = range(second - WINDOWS_S[0] + 1, second + 1)
    return [by_second[each] for each in span if each in by_second]


def history_point(second: int, slot: Slot | None, near: list[Slot]) -> HistoryPoint:
    """Return the point of one second: its counts, and the latencies of the slots `near`."""
    ended = [request for each in near for request in each.ended]
    ttft = p50_p99([one.ttft_s for one in ended if one.ttft_s is not None])
    tpot = p50_p99([one.tpot_s for one in ended if one.tpot_s is not None])
    at_s = float(second + 1)
    if slot is None:
        return HistoryPoint(at_s, 0, 0, 0.0, 0.0, 0.0, *ttft, *tpot)
    output = slot.first_tokens + sum(gaps.count for gaps in slot.gap_counts().values())
    steps = [part for part in (slot.decode, slot.prefill) if part.count]
    count = sum(part.count for part in steps) or 1
    running = sum(part.num_running for part in steps) / count
    waiting = sum(part.num_waiting for part in steps) / count
    usage = sum(part.kv_usage for part in steps) / count
    return HistoryPoint(at_s, output, slot.prompt_tokens, running, waiting, usage, *ttft, *tpot)


def p50_p99(values: list[float]) -> tuple[float | None, float | None]:
    """Return (p50, p99) of `values`, None without values."""
    if not values:
        return None, None
    middle, tail = np.quantile(values, (0.5, 0.99)).tolist()
    return middle, tail
