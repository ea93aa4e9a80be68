"""int4 that is measured: a profile of the model, formats by module, scales by power of inputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drive import engine_for, finish
from headway.compress import at_load
from headway.compress.at_load import CANDIDATES, allocate, choose_formats, num_weights
from headway.compress.rows import RowModel
from headway.compress.sensitivity import measure
from headway.config.options import EngineOptions
from headway.core.errors import CheckpointError
from headway.core.request import Request, SamplingParams
from headway.planning import plan_settings
from headway.runtime.quantized.profile import read_profile, write_profile
from headway.runtime.rounding import round_weight, round_weight_by_power
from headway.spec import quantization, read_model_spec
from headway.spec.formats import ROTATED_INT8, Format
from headway.spec.quantization import q4_k_m_budget
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = [[(7 * i + j) % 90 + 5 for i in range(48)] for j in range(4)]
MEASURED = {"quantization": "int4", "max_model_len": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headway" / "profiles"


@pytest.fixture(params=["qwen2", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tiny_model(request.param, initializer_range=0.12), tmp_path / "model")


def log_shares(folder: Path, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    """fp32 log-probabilities of ROWS with some matrices of the checkpoint changed."""
    model = RowModel(folder)
    read = model.tensors.read
    model.tensors.read = lambda name: changed.get(name) if name in changed else read(name)
    lens, x_TH = [len(row) for row in ROWS], model.embed(ROWS)
    for index in range(model.spec.num_layers):
        x_TH = model.run(model.layer(index), x_TH, lens)
    return torch.log_softmax(model.logits(model.norm(), model.head(), x_TH), -1)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3moe"])
def test_the_sum_of_losses_is_the_divergence_of_the_whole(family: str, tmp_path: Path):
    """Of all matrices in int4: predicted from one backward pass, and measured."""
    folder = save(tiny_model(family, initializer_range=0.12), tmp_path / "one")
    model, format = RowModel(folder), Format("int4", 32)
    profile = measure(model, ROWS, [format])
    changed = {
        f"{name}.weight": round_weight_by_power(
            model.tensors.read(f"{name}.weight").float(), 32, one.power_I
        ).plain()
        for name, one in profile.items()
    }
    assert len(changed) >= 7 * model.spec.num_layers
    p, q = log_shares(folder, {}), log_shares(folder, changed)
    found = float((p.exp() * (p - q)).sum(-1).mean())
    predicted = sum(one.losses[format] for one in profile.values())
    assert found > 1e-4
    assert predicted == pytest.approx(found, rel=0.5)


def test_searched_scales_lose_less_of_the_outputs():
    """With inputs of very different power, on weights with an outlier in each group."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 100, generator=generator)
    weight[:, ::32] *= 4
    power = torch.logspace(-3, 1, 100)
    plain = round_weight(weight, 32).plain() - weight
    searched = round_weight_by_power(weight, 32, power)
    assert searched.format == Format("int4", 32)
    lost = float(((searched.plain() - weight).square() * power).sum())
    assert lost < 0.8 * float((plain.square() * power).sum())


def test_formats_are_chosen_within_the_bytes_of_q4_k_m(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = read_model_spec(folder)
    chosen = choose_formats(folder, spec, folder)
    profile = read_profile(Path(chosen.spec.profile))
    found = allocate(spec, profile)
    parts = [(one.module, one.part, one.shape) for one in profile.values()]
    cheapest = sum(Format("int4", 64).num_bytes(*one.shape) for one in profile.values())
    assert sum(c.num_bytes for c in found.values()) <= max(q4_k_m_budget(spec, parts), cheapest)
    assert "bits a weight" in chosen.why and "KL" in chosen.why
    monkeypatch.setattr(quantization, "Q5_0", 7.0)
    better = allocate(spec, profile)
    assert sum(c.kl for c in better.values()) < sum(c.kl for c in found.values())
    assert all(set(one.losses) == set(CANDIDATES) for one in profile.values())
    assert all(one.losses[ROTATED_INT8] < one.losses[CANDIDATES[0]] for one in profile.values())
    assert min(map(num_weights, profile.values())) > 0


def test_a_model_is_measured_once_and_served_as_it_was_chosen(folder: Path, cache: Path):
    requests = [Request(i, row[:20], GREEDY) for i, row in enumerate(ROWS)]
    first = engine_for(folder, **MEASURED)
    tokens = finish(first, requests)
    (path,) = cache.iterdir()
    written = path.stat().st_mtime_ns
    again = finish(engine_for(folder, **MEASURED), requests)
    assert path.stat().st_mtime_ns == written
    assert {k: v.token_ids for k, v in again.items()} == {k: v.token_ids for k, v in tokens.items()}
    alone = [finish(engine_for(folder, **MEASURED), [one]) for one in requests]
    for key, one in zip(sorted(tokens), alone, strict=True):
        assert one[key].token_ids == tokens[key].token_ids
    plain = plan_settings(folder, EngineOptions(**MEASURED, quantization_group=64))
    assert plain[0].profile == "" and not plain[1].quantization.profile
    assert first.settings.quantization.profile == str(path)


def test_ranks_answer_as_one_engine(tmp_path: Path):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 256}
    folder = save(tiny_model("llama", **sizes), tmp_path / "model")
    requests = [Request(i, row[:20], GREEDY) for i, row in enumerate(ROWS)]
    options = {**MEASURED, "sum_parts": 2}
    one = finish(engine_for(folder, **options), requests)
    engine = engine_for(folder, tensor_parallel_size=2, **options)
    try:
        two = finish(engine, requests)
    finally:
        engine.executor.close()
    assert {k: v.token_ids for k, v in one.items()} == {k: v.token_ids for k, v in two.items()}


def test_a_profile_that_cannot_be_read_is_an_error_by_name(tmp_path: Path):
    path = tmp_path / "profile.safetensors"
    path.write_bytes(b"no profile")
    with pytest.raises(CheckpointError, match="--quantization-group 64"):
        read_profile(path)
    write_profile(path, {})
    assert read_profile(path) == {}


def test_a_profile_that_is_spoiled_is_measured_again(tmp_path: Path, cache: Path):
    folder = save(tiny_model("llama"), tmp_path / "model")
    spec = read_model_spec(folder)
    first = choose_formats(folder, spec, folder)
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert choose_formats(folder, spec, folder).spec == first.spec
    assert list(cache.iterdir()) == [path] and read_profile(path)


def test_another_tokenizer_is_another_profile(tmp_path: Path, cache: Path):
    """What was measured on random tokens is not taken for what a text shows."""
    folder = save(tiny_model("llama"), tmp_path / "model")
    spec = read_model_spec(folder)
    without = choose_formats(folder, spec, folder).spec.profile
    (folder / "tokenizer.json").write_text("{}")
    assert choose_formats(folder, spec, folder).spec.profile != without


def test_numbers_that_are_not_finite_choose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = save(tiny_model("llama"), tmp_path / "model")
    spec = read_model_spec(folder)
    measured = at_load.measure_profile(folder, spec, folder)
    name, one = next(iter(measured.items()))
    spoiled = measured | {name: replace(one, losses={f: float("nan") for f in one.losses})}
    monkeypatch.setattr(at_load, "measure_profile", lambda *_: spoiled)
    chosen = choose_formats(folder, spec, folder)
    assert chosen.spec == spec and "not finite" in chosen.why


def test_models_that_are_not_measured_say_why(tmp_path: Path):
    """Experts, and attention that is not computed on whole rows: one format for all."""
    for family, word in (("qwen3moe", "experts"), ("deepseekv3", "experts"), ("gemma3n", "plain")):
        folder = save(tiny_model(family), tmp_path / family)
        spec = read_model_spec(folder)
        chosen = choose_formats(folder, spec, folder)
        assert chosen.spec == spec and word in chosen.why
