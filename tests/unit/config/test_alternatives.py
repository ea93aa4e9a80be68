"""What a server is told it could be started with: derived from the rules that resolve settings."""

import pytest

from headway.config.alternatives import kv_choices, weight_choices
from headway.config.options import EngineOptions
from headway.config.resolve import Settings, resolve
from headway.core.errors import UsageError
from headway.core.machine import Machine
from headway.spec.quantization import bytes_per_weight
from headway.telemetry.stats import take_snapshot
from telemetry_cases import VirtualClock, llama, telemetry

NATIVE = Machine(num_cores=2, total_bytes=2**34, free_bytes=2**33, native="avx2", native_why="")
PLAIN = Machine(num_cores=2, total_bytes=2**34, free_bytes=2**33)


def settings(machine: Machine, **options: object) -> Settings:
    return resolve(EngineOptions(device="cpu", **options), machine, llama())[0]


def as_options(flag: str) -> EngineOptions:
    """ "--quantization int8" → EngineOptions(quantization="int8")."""
    name, value = flag.removeprefix("--").split()
    return EngineOptions(device="cpu", **{name.replace("-", "_"): value})


@pytest.mark.parametrize("machine", [NATIVE, PLAIN], ids=["native", "torch"])
def test_what_is_offered_can_be_started_and_takes_what_is_said(machine):
    stats, spec = settings(machine).to_stats(), llama()
    choices = weight_choices(stats, spec)
    if machine is NATIVE:  # resolve() does not measure formats: int4 has a test of its own
        choices.pop("--quantization int4")
    for flag, size in choices.items():
        found, _ = resolve(as_options(flag), machine, spec)
        share = bytes_per_weight(found.quantization, spec, found.dtype) / 4
        expected = spec.step_weight_bytes(found.dtype) * (share or 1)
        assert size == round(expected) < spec.step_weight_bytes("float32")
    for flag, size in kv_choices(stats, spec).items():
        found, _ = resolve(as_options(flag), machine, spec)
        assert size == spec.kv_bytes_per_token(found.cache.dtype)


def test_int4_takes_what_its_measured_formats_take():
    """The bytes of Q4_K_M: of SmolLM2-135M's shape 104 MB, where int4 by 64 alone takes 85 MB."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    spec = llama(vocab_size=49152, tie_word_embeddings=True, **shape, **heads)
    choices = weight_choices(settings(NATIVE).to_stats(), spec)
    assert choices["--quantization int4"] == pytest.approx(103.7e6, rel=0.01)
    assert choices["--quantization int8"] > choices["--quantization int4"]


def test_what_the_resolver_refuses_is_not_offered():
    """int8 KV needs native attention; a GPU has no rounded weights yet."""
    assert list(kv_choices(settings(NATIVE).to_stats(), llama())) == ["--kv-cache-dtype int8"]
    assert kv_choices(settings(PLAIN).to_stats(), llama()) == {}
    with pytest.raises(UsageError):
        settings(PLAIN, kv_cache_dtype="int8")
    on_cuda = {**settings(NATIVE).to_stats(), "device": "cuda"}
    assert list(weight_choices(on_cuda, llama())) == ["--dtype bfloat16"]


def test_nothing_is_offered_where_settings_are_not_told():
    assert weight_choices({}, llama()) == kv_choices({}, llama()) == {}


def test_stats_say_which_settings_the_server_runs_with():
    model = telemetry(VirtualClock())
    model.ready.settings = settings(NATIVE, quantization="int4").to_stats()
    found = take_snapshot(model)
    assert found.settings["quantization"] == "int4 in groups of 64"
    assert found.settings["kv_dtype"] == "float32" and found.settings["policy"] == "slo"
    assert set(found.model.weight_choices) == {"--quantization int8"}, "its own is no choice"
