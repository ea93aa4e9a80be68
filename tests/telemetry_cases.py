"""A small model, an engine that introduces itself, and step records, for tests of telemetry."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.clock import VirtualClock
from headway.core.plan import Ceilings, Description
from headway.core.records import StepRecord
from headway.core.service import UnloadedTimes, service_classes
from headway.spec import ModelSpec, spec_from_config
from headway.telemetry.live import Telemetry
from headway.telemetry.timeline import RequestTimeline

BANDWIDTH, PEAK = 1e9, 1e11
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


@dataclass
class Ready:
    """What an engine says when it is ready."""

    description: Description
    max_model_len: int = 2048
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    vocab_size: int = 1000
    block_size: int = 16
    group_blocks: list[int] = field(default_factory=lambda: [100])
    dtype: str = "float32"
    kv_dtype: str = "float32"
    settings: dict[str, str] = field(default_factory=lambda: {"prefix_cache": "lfu"})
    alone: UnloadedTimes = UnloadedTimes()
    kv_read: float = 1.0
    kv_keep: float = 1.0


def llama(**more: Any) -> ModelSpec:
    return spec_from_config({**LLAMA, **more}, {})


def ceilings(bandwidth: float = BANDWIDTH, peak: float = PEAK, cache: int = 0) -> Ceilings:
    return Ceilings(
        bandwidth_bytes_per_s=bandwidth,
        flops_per_s=peak,
        flops_dtype="float32",
        cache_bytes=cache,
        num_probes=1,
    )


def telemetry(
    clock: VirtualClock, cache: int = 0, slo: Sequence[str] = (), **more: Any
) -> Telemetry:
    """A model whose engine is ready on a machine of 1 GB/s and 100 GFLOP/s."""
    found = Telemetry(["made-up"], llama(), clock=clock, classes=service_classes(slo), **more)
    description = Description(device="cpu", name="made up", ceilings=ceilings(cache=cache))
    found.on_ready(Ready(description))
    return found


def begin(model: Telemetry, request_id: str, **more: Any) -> RequestTimeline:
    """A request that arrives now, with a prompt of 10 tokens."""
    given = {"arrived_s": model.clock.now_s(), "num_prompt": 10, "num_choices": 1, **more}
    return model.begin(request_id, **given)


def answer(
    model: Telemetry, clock: VirtualClock, request_id: str, gaps: list[float], **more: Any
) -> RequestTimeline:
    """A request whose tokens leave after these gaps, the first after `gaps[0]`."""
    timeline = begin(model, request_id, **more)
    timeline.on_scheduled(clock.now_s() + gaps[0] / 2, 0)
    for gap in gaps:
        clock.advance(gap)
        timeline.add_tokens(0, 1)
    timeline.complete()
    return timeline


def step(number: int = 0, **more: Any) -> StepRecord:
    """A decode step of 4 rows that took 10 ms, 8 ms of them the model."""
    given: dict[str, Any] = {
        "started_s": 0.0,
        "num_running": 4,
        "num_waiting": 0,
        "num_tokens": 4,
        "num_sampled": 4,
        "num_decode_tokens": 4,
        "attended_tokens": 400,
        "kv_tokens_read": (400,),
        "group_blocks_used": (28,),
        "kv_blocks_used": 28,
        "kv_usage": 0.28,
        "num_preemptions": 0,
        "schedule_s": 0.0005,
        "execute_s": 0.009,
        "update_s": 0.0005,
        "prepare_s": 0.0002,
        "forward_s": 0.008,
        "sample_s": 0.0005,
        **more,
    }
    return StepRecord(step=number, **given)


def decoded(seconds: float, *, prefill: int = 0, rows: int = 0) -> StepRecord:
    """A step of so many prompt tokens and so many rows that decode."""
    return StepRecord(
        step=0,
        started_s=0.0,
        num_running=rows,
        num_waiting=0,
        num_tokens=prefill + rows,
        num_sampled=rows,
        kv_blocks_used=0,
        kv_usage=0.0,
        num_preemptions=0,
        execute_s=seconds,
        num_decode_tokens=rows,
    )
