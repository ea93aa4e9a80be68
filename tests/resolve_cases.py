"""Machines and models to resolve options on."""

import dataclasses

from headway.config.options import EngineOptions
from headway.config.resolve import Settings, resolve
from headway.core.machine import Accelerator, Machine
from headway.spec import spec_from_config

GIB = 2**30


QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


WEIGHTS = 2 * 494_032_768


TOKEN = 12_288  # 2 · 24 layers · 2 heads · 64 dims · 2 bytes


BLOCK = 16 * TOKEN


def machine(free=10 * GIB, *, cores=8, gpu_free=None, gpu_total=80 * GIB) -> Machine:
    accelerator = None
    if gpu_free is not None:
        accelerator = Accelerator(name="H200", total_bytes=gpu_total, free_bytes=gpu_free)
    return Machine(
        num_cores=cores,
        total_bytes=64 * GIB,
        free_bytes=free,
        cpu_flags=frozenset({"avx512_bf16"}),
        accelerator=accelerator,
    )


def model(**changes):
    return spec_from_config({**QWEN, **changes}, {})


def decide(on=None, spec=None, **options) -> tuple[Settings, dict[str, str]]:
    """The settings and name → "value: why"."""
    settings, reasons = resolve(EngineOptions(**options), on or machine(), spec or model())
    told = {reason.name: f"{reason.value}: {reason.why}" for reason in reasons}
    assert len(told) == len(reasons), "a setting has two reasons"
    return settings, told


def gpu(has_kernels: bool = True, spec=None, has_flashinfer: bool = True, **options) -> Settings:
    """The settings on a machine with a GPU."""
    on = machine(gpu_free=80 * GIB)
    there = {"has_kernels": has_kernels, "kernels_why": "why", "has_flashinfer": has_flashinfer}
    accelerator = dataclasses.replace(on.accelerator, **there)
    return resolve(
        EngineOptions(**options), dataclasses.replace(on, accelerator=accelerator), spec or model()
    )[0]
