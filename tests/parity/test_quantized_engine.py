"""Engines on int8 and int4 weights: close to the plain model, the same whoever runs beside."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drive import engine_for
from headway.assemble import make_executor
from headway.config import resolve
from headway.config.options import EngineOptions
from headway.core.plan import NewSequence, ScheduledSequence, StepPlan
from headway.core.request import SamplingParams
from headway.engine.engine import Engine
from headway.planning import plan_settings
from headway.runtime.executor import TorchExecutor
from headway.runtime.experts import ExpertLinear
from headway.runtime.layers import Linear
from headway.runtime.native.available import best_instruction_set
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.spec.formats import INT8, PLAIN, Format
from headway.spec.quantization import Quantization, planned_bytes
from parity import cobatch
from parity.logits import our_logits
from parity.tiny import prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["qwen2", "qwen3moe", "gemma2"]
"""Biases, experts, a tied head."""
FORMATS = [("int8", 64), ("int4", 32), ("int4", 128)]
LARGEST_KL = {"int8": 5e-3, "int4": 0.12}
KERNELS = ["auto", "torch"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(request.param), tmp_path_factory.mktemp(request.param))


def distributions(folder: Path, **options: object) -> Tensor:
    """Log-probabilities after each token of three prompts."""
    return expected_after(engine_for(folder, **options).executor)


def expected_after(executor: object) -> Tensor:
    """The same of an executor."""
    assert isinstance(executor, TorchExecutor)
    new = [
        NewSequence(i, 0, prompt, len(prompt), SamplingParams(), 0)
        for i, prompt in enumerate(prompts([40, 7, 20]))
    ]
    blocks = [[3 * i + 1, 3 * i + 2, 3 * i + 3] for i in range(3)]
    advanced = [
        ScheduledSequence(i, 0, one.token_ids, [blocks[i]], True) for i, one in enumerate(new)
    ]
    executor.submit(StepPlan(0, new, advanced, []))
    return torch.cat([torch.from_numpy(each) for each in executor.distributions()])


def divergence(expected: Tensor, found: Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize(("quantization", "group"), FORMATS)
def test_rounded_models_are_close(folder: Path, quantization: str, group: int):
    """To the plain model, and native to plain torch; a level may fall to the other side."""
    options = {"quantization": quantization, "quantization_group": group}
    plain = distributions(folder)
    ours, torchs = (distributions(folder, kernels=kernels, **options) for kernels in KERNELS)
    assert 0 < divergence(plain, torchs) < LARGEST_KL[quantization]
    assert abs(divergence(torchs, ours)) < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_layers_have_their_format_and_let_go(folder: Path, quantization: str, kernels: str):
    """The head is int8, a router stays plain, and the bytes are those that were planned."""
    group = 64 if quantization == "int4" else 0
    engine = engine_for(
        folder, quantization=quantization, quantization_group=group, kernels=kernels
    )
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    wanted = Quantization.of(quantization, 64)
    for name, module in executor.model.named_modules():
        if isinstance(module, Linear | ExpertLinear):
            format = wanted.format_of(name)
            assert getattr(module.kernel, "format", PLAIN) == format, name
            assert format == PLAIN or module.weight is None
    description = executor.describe()
    planned = planned_bytes(wanted, executor.spec, executor.settings.dtype)
    assert planned * 0.9 < description.weight_bytes < planned * 2.5  # panels of 16 of 24 outputs
    assert quantization in description.kernels["quantized"][1] or kernels == "torch"


MIXED_MAP = (
    ("head", PLAIN),
    ("layers.0.mlp.down", INT8),
    ("layers.0.*", Format("int4", 32)),
    ("*.router", PLAIN),
    ("*.qkv", PLAIN),
    ("*", Format("int4", 128)),
)


def mixed_executor(
    folder: Path, formats: tuple[tuple[str, Format], ...], kernels: str = "auto"
) -> TorchExecutor:
    """An executor whose modules have these formats."""
    table = EngineOptions(device="cpu", kv_memory=2**23, threads=1, kernels=kernels)
    spec, settings, _, machine = plan_settings(folder, table)
    cache = 2**30 if settings.kernels == "native" else 0
    found = replace(settings, quantization=Quantization(formats), weight_cache_bytes=cache)
    executor = make_executor(folder, table, spec, found, machine, None)
    assert isinstance(executor, TorchExecutor)
    return executor


def test_each_module_has_a_format_of_its_own(folder: Path, kept: Path, rounded: list[int]):
    """Native as torch; a second start reads all of them, another map packs its own."""
    ours, torchs = (mixed_executor(folder, MIXED_MAP, kernels) for kernels in KERNELS)
    formats = {
        name: getattr(module.kernel, "format", PLAIN)
        for name, module in ours.model.named_modules()
        if isinstance(module, Linear | ExpertLinear)
    }
    for layer, wanted in enumerate([(Format("int4", 32), INT8), (PLAIN, Format("int4", 128))]):
        names = (f"layers.{layer}.attention.qkv", f"layers.{layer}.mlp.down")
        assert tuple(formats[name] for name in names) == wanted
    assert formats["head"] == PLAIN
    first = expected_after(ours)
    assert abs(divergence(expected_after(torchs), first)) < 1e-4
    wait_for_writers()
    rounded.clear()
    assert torch.equal(expected_after(mixed_executor(folder, MIXED_MAP)), first)
    assert len(rounded) == 0
    other = (("layers.1.mlp.down", INT8), *MIXED_MAP)
    assert not torch.equal(expected_after(mixed_executor(folder, other)), first)
    assert len(rounded) > 0


def test_without_the_native_kernels_it_says_so(folder: Path, monkeypatch):
    from headway.runtime.kernels import table

    monkeypatch.setattr(table, "load", lambda threads: (None, "no compiler"))
    engine = engine_for(folder, quantization="int8")
    name, why = engine.executor.describe().kernels["quantized"]
    assert (name, "no time" in why) == ("torch", True)


WEIGHTS = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "quantization_group": 32},
}
MIXED = {
    f"{name}, KV {kv}": {**options, "kv_cache_dtype": kv}
    for name, options in WEIGHTS.items()
    for kv in ("auto", "int8")
}


@pytest.fixture(scope="module", params=MIXED.values(), ids=list(MIXED))
def mixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, list[Engine]]:
    """An engine for one request at a time, and some with little room."""
    if request.param["kv_cache_dtype"] == "int8" and not best_instruction_set()[0]:
        pytest.skip("KV in int8 is for native attention")
    return cobatch.rounded_engines(tmp_path_factory.mktemp("mixed"), **request.param)


def test_tokens_do_not_depend_on_what_runs_beside_them(mixed):
    for number in range(4):
        cobatch.check_mix(number, *mixed)


def test_tokens_do_not_depend_on_guesses(mixed):
    kept: list[int] = []
    for number in range(6):
        cobatch.check_mix(number, *mixed, kept)
    assert sum(kept) > 50, "the guesses are too bad to prove much"


@pytest.mark.hardening
def test_tokens_do_not_depend_on_guesses_at_length(mixed):
    kept: list[int] = []
    for number in range(60, 260):
        cobatch.check_mix(number, *mixed, kept)
    assert sum(kept) > 2000, "the guesses are too bad to prove much"


@pytest.mark.hardening
def test_tokens_do_not_depend_on_what_runs_beside_them_at_length(mixed):
    for number in range(60, 260):
        cobatch.check_mix(number, *mixed)


# ── packed weights on disk ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights; models of any size are kept."""
    if not best_instruction_set()[0]:
        pytest.skip(best_instruction_set()[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(resolve, "SMALL_MODEL_BYTES", 0)
    return tmp_path / "headway" / "weights"


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Outputs of the matrices that were rounded."""
    outputs: list[int] = []
    plain_prepare = NativeQuantizedLinear.prepare

    def noted(self: NativeQuantizedLinear, weight_OH: Tensor) -> object:
        outputs.append(len(weight_OH))
        return plain_prepare(self, weight_OH)

    monkeypatch.setattr(NativeQuantizedLinear, "prepare", noted)
    return outputs


def start(folder: Path, **options: object) -> Tensor:
    """`distributions` once the writer has ended."""
    found = distributions(folder, **options)
    wait_for_writers()
    return found


def wait_for_writers() -> None:
    """Until what was packed is on disk."""
    for thread in threading.enumerate():
        if thread.name == "weight cache writer":
            thread.join()


@pytest.mark.parametrize(("quantization", "group"), FORMATS)
def test_a_second_start_reads_what_the_first_packed(folder, kept, rounded, quantization, group):
    """Bit for bit, experts and tied heads too; another format and a damaged file are packed."""
    options = {"quantization": quantization, "quantization_group": group}
    first = start(folder, **options)
    assert len(rounded) > 0
    rounded.clear()
    assert torch.equal(start(folder, **options), first)
    assert len(rounded) == 0
    start(folder, quantization="int4", quantization_group=64)
    assert len(rounded) > 0
    assert len(list(kept.glob("*.weights"))) == 2
    for path in kept.glob("*.weights"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    rounded.clear()
    assert torch.equal(start(folder, **options), first)
    assert len(rounded) > 0
    rounded.clear()
    assert torch.equal(start(folder, **options), first)
    assert len(rounded) == 0


def test_other_weights_in_the_same_folder_are_packed(tmp_path, kept, rounded):
    folder = save(tiny_model("qwen2"), tmp_path)
    first = start(folder, quantization="int8")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, path)
    rounded.clear()
    assert not torch.equal(start(folder, quantization="int8"), first)
    assert len(rounded) > 0


def test_the_cache_can_be_off(folder, kept, rounded):
    for _ in range(2):
        rounded.clear()
        start(folder, quantization="int8", weight_cache=0)
        assert len(rounded) > 0
    assert not kept.exists()


@pytest.mark.parametrize(
    "family", ["mixtral", "ministral3", "qwen2moe", "olmo3", "lfm2", "lfm2moe"]
)
def test_other_families_rounded_are_close(family: str, tmp_path: Path):
    """int8 and int4 by 32, native and torch: more experts, ropes and states than those above."""
    folder = save(tiny_model(family, initializer_range=0.05), tmp_path)
    (prompt,) = prompts([40])

    def after(**options: object) -> Tensor:
        executor = engine_for(folder, **options).executor
        assert isinstance(executor, TorchExecutor)
        return our_logits(executor, prompt).log_softmax(-1)

    plain = after()
    for quantization, most in LARGEST_KL.items():
        options = {"quantization": quantization, "quantization_group": 32}
        ours, torchs = (after(**options, kernels=each) for each in KERNELS)
        assert 0 < divergence(plain, torchs) < most, quantization
        assert abs(divergence(torchs, ours)) < 1e-4, quantization
