"""Training: the models that serve with gradients, rounding they pass through, runs that go on."""

import csv
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from headway.compress.calibration import HeldOut, shingles
from headway.compress.train.checkpoint import own_tensors
from headway.compress.train.data import Mixture, TokenSource
from headway.compress.train.distill import divergence
from headway.compress.train.fake import FakeRounding
from headway.compress.train.loop import CosineSchedule, Training, minutes, train
from headway.compress.train.model import TrainedModel, check_trainable_formats, spec_of
from headway.compress.train.run import (
    DistillPlan,
    TeacherStudent,
    distill,
    open_models,
    prepare,
)
from headway.compress.train.student import rounded_layers
from headway.compress.train.texts import (
    ANSWER_WEIGHT,
    PROMPT_WEIGHT,
    chat,
    paragraphs,
    parse_source,
    records,
)
from headway.compress.train.written import write_student
from headway.core.errors import HeadwayError, ModelError, UsageError
from headway.runtime.kernels import reference
from headway.runtime.rounding import round_weight
from headway.spec.formats import INT8, Format
from headway.spec.quantization import Quantization
from parity.tiny import prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = torch.tensor(prompts([40] * 3))
DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite"),
    "smollm3",
)


# ── the models ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", DENSE)
def test_every_family_says_what_it_says_and_learns(family: str, tmp_path: Path):
    """transformers' logits; and a gradient for every weight, head and norms included."""
    theirs = tiny_model(family)
    model = TrainedModel.open(save(theirs, tmp_path / "m"))
    ours = model.logits(model(ROWS))
    with torch.no_grad():
        assert_close(ours, theirs(ROWS).logits, atol=2e-4, rtol=1e-4)
    ours.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
    written = model.tensors()
    expected = load_file(tmp_path / "m" / "model.safetensors")
    assert written.keys() >= expected.keys() - {"lm_head.weight"}
    for name, value in written.items():
        assert torch.equal(value, expected[name])


def test_experts_are_refused(tmp_path: Path):
    folder = save(tiny_model("qwen3moe"), tmp_path / "m")
    with pytest.raises(HeadwayError, match="experts"):
        TrainedModel.open(folder)


# ── rounding ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("group", [0, 32, 64])
def test_forward_is_what_will_be_served(group: int):
    """The product of the levels and scales that are written, by the kernels' own definition."""
    generator = torch.Generator().manual_seed(group)
    weight = torch.randn(24, 100, generator=generator)
    fake = FakeRounding(round_weight(weight, group))
    fake.stretch_OG.data.normal_(0, 0.05, generator=generator)
    x = torch.randn(7, 100, generator=generator)
    inputs, rounded = fake(x, weight)
    assert_close(
        inputs @ rounded.T,
        reference.quantized_linear(x, fake.rounded(weight), None),
        atol=1e-4,
        rtol=1e-5,
    )
    scales = fake.rounded(weight).scales_OG
    assert torch.equal(scales.bfloat16().float(), scales)
    assert torch.equal(scales.half().float(), scales)


def test_gradients_pass_rounding_as_if_it_were_not_there():
    """Weight 0.26 of scale 0.1 is level 3; the scale gets 3 - 2.6 of it, a clipped weight none."""
    weight = torch.tensor([[0.26, -0.1, 9.0, -0.8]], requires_grad=True)
    fake = FakeRounding(round_weight(torch.tensor([[0.2, 0.1, 0.3, -0.8]]), 4))
    fake.start_OG.fill_(0.125)  # which bf16 holds
    _, rounded = fake(torch.ones(1, 4), weight)
    assert_close(rounded.detach(), torch.tensor([[0.25, -0.125, 0.875, -0.75]]))
    rounded.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[1.0, 1.0, 0.0, 1.0]]
    lsq = sum(level - 8 * w for level, w in ((2, 0.26), (-1, -0.1), (-6, -0.8))) + 7
    assert fake.stretch_OG.grad is not None
    assert float(fake.stretch_OG.grad) == pytest.approx(0.125 * lsq, rel=1e-4)


# ── the loss and the data ───────────────────────────────────────────────────────────────────


def test_divergence_by_hand():
    """Of (1/2, 1/2) from (3/4, 1/4): 3/4 ln(3/2) + 1/4 ln(1/2); softened by 2 four times as much
    of what softer ones differ by."""
    taught, student = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    assert float(divergence(taught, student)) == pytest.approx(0.130812, rel=1e-4)
    soft = torch.tensor([3.0, 1.0]).sqrt()
    soft = soft / soft.sum()
    expected = 4 * float((soft * (soft * 2).log()).sum())
    assert float(divergence(taught, student, 2.0)) == pytest.approx(expected, rel=1e-4)


def source(name: str, share: float, first: int) -> TokenSource:
    """Documents of ten tokens, all the same within one; half of them count."""
    documents = [[([first + i] * 5, 0.0), ([first + i] * 5, 1.0)] for i in range(40)]
    return TokenSource.of(name, share, documents)


def test_rows_begin_at_documents_and_come_by_share():
    mixture = Mixture(
        sources=[source("a", 3, 0), source("b", 1, 100)], num_rows=8, length=20, seed=5
    )
    assert mixture.split() == [6, 2] and mixture.shares == [0.75, 0.25]
    inputs, targets, weights = mixture.batch(3)
    assert inputs.shape == targets.shape == weights.shape == (8, 20)
    assert (inputs[:6] < 100).all() and (inputs[6:] >= 100).all()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert weights[0].tolist() == ([0.0] * 4 + [1.0] * 5 + [0.0]) * 2
    again = mixture.batch(3)[0]
    assert torch.equal(again, inputs) and not torch.equal(mixture.batch(4)[0], inputs)


def test_a_source_that_is_too_short_and_rows_too_few_are_refused():
    short = TokenSource.of("short.txt", 1, [[([1, 2, 3], 1.0)]])
    with pytest.raises(UsageError, match=r"short.txt has 3 tokens"):
        Mixture(sources=[short], num_rows=1, length=8, seed=0)
    with pytest.raises(UsageError, match="cannot hold 2 sources"):
        Mixture(sources=[source("a", 1, 0), source("b", 1, 9)], num_rows=1, length=8, seed=0)


class Letters:
    """A tokenizer of letters, whose template writes U: and A: before what is said."""

    template: Any = "a template"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def render(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        text = "".join(f"{m['role'][0].upper()}:{m['content']}\n" for m in messages)
        return text + "A:" * options.get("add_generation_prompt", True)


def test_what_is_answered_counts_and_what_is_read_a_little():
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert chat(said, Letters()) == [
        (list(b"U:hi\nA:"), PROMPT_WEIGHT),
        (list(b"ho\n"), ANSWER_WEIGHT),
    ]
    lines = iter([json.dumps({"messages": said}) + "\n", "\n", '{"text": "sea"}\n'])
    assert list(records(lines, "f.jsonl", Letters(), HeldOut())) == [
        chat(said, Letters()),
        [(list(b"sea"), ANSWER_WEIGHT)],
    ]
    texts = list(paragraphs(iter(["one\n", "two\n", "\n", "three\n"]), Letters(), HeldOut()))
    assert [bytes(document[0][0]) for document in texts] == [b"one\ntwo\n\n", b"three\n"]
    with pytest.raises(UsageError, match=r"f.jsonl, line 1"):
        list(records(iter(["[1]\n"]), "f.jsonl", Letters(), HeldOut()))


def test_paragraphs_that_are_tested_are_left_out():
    """Thirteen words in a row of an evaluation's text, whatever their case; the others stay."""
    tested = HeldOut()
    line = "they found a red ball under the old tree and went home at night\n"
    tested.shingles.update(shingles(line))
    lines = ["One day,\n", line.upper(), "\n", "they found a red ball\n", "\n", "three\n"]
    found = TokenSource.of("f", 1.0, paragraphs(iter(lines), Letters(), tested))
    assert bytes(found.tokens_N.tolist()) == b"they found a red ball\n\nthree\n"
    assert found.left_out == 1 and len(found.starts) == 2
    with pytest.raises(UsageError, match=r"f.jsonl, line 1, has passages"):
        list(records(iter([json.dumps({"text": line})]), "f.jsonl", Letters(), tested))


def test_shares_stand_behind_a_colon():
    assert parse_source("books.txt:0.7") == ("books.txt", 0.7)
    assert parse_source("C:books.txt") == ("C:books.txt", 1.0)
    with pytest.raises(UsageError, match="above 0"):
        parse_source("skills:0")


# ── runs ────────────────────────────────────────────────────────────────────────────────────

SOURCES = [
    TokenSource.of(
        "a", 1, [[(torch.randint(211, (50,), generator=g).tolist(), 1.0)] for _ in range(30)]
    )
    for g in [torch.Generator().manual_seed(1)]
]
PLAN = DistillPlan(steps=6, step_tokens=64, row_length=16, learning_rate=0.003)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a teacher, a student that is the teacher with some zeros)."""
    root = tmp_path_factory.mktemp("distill")
    model = tiny_model("llama", tie_word_embeddings=True)
    teacher = save(model, root / "teacher")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:, ::2] = 0
    student = save(model, root / "student")
    for folder in (teacher, student):
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return teacher, student


def open_pair(
    teacher: Path, student: Path, plan: DistillPlan, sources: list[TokenSource], save_every: int
) -> TeacherStudent:
    """Teacher and student of two folders, ready for training."""
    return prepare(*open_models(teacher, student, plan), plan, sources, save_every)


def trained(
    folders: tuple[Path, Path], run: Path, plan: DistillPlan, stop: int = 99
) -> TrainedModel:
    """A run in `run`, cut short before step `stop`."""
    pair = open_pair(*folders, plan, SOURCES, save_every=2)
    losses = pair.training.losses

    def cut(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        if step == stop:
            raise KeyboardInterrupt
        return losses(step)

    training = dataclasses.replace(pair.training, losses=cut, log_every=1)
    return distill(
        dataclasses.replace(pair, training=training),
        run,
        {"plan": plan.steps},
        lambda done, told: None,
    )


def loss_of(pair: TeacherStudent) -> float:
    """Of the first step's rows."""
    return pair.losses(0)[0].item()


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_run_that_was_killed_ends_as_it_would_have(
    quantization: str, folders: tuple[Path, Path], tmp_path: Path
):
    """Bit for bit, scales included; the log has each step once."""
    plan = dataclasses.replace(PLAN, quantization=Quantization.of(quantization, 32))
    whole = own_tensors(trained(folders, tmp_path / "whole", plan))
    with pytest.raises(KeyboardInterrupt):
        trained(folders, tmp_path / "cut", plan, stop=5)
    resumed = own_tensors(trained(folders, tmp_path / "cut", plan))
    start = own_tensors(TrainedModel.open(folders[1]))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert not torch.equal(whole["decoder.norm.weight"], start["decoder.norm.weight"])
    with (tmp_path / "cut" / "loss.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == list("123456")


def test_the_student_comes_nearer_and_its_zeros_stay(folders: tuple[Path, Path], tmp_path: Path):
    plan = dataclasses.replace(PLAN, steps=30)
    pair = open_pair(*folders, plan, SOURCES, save_every=100)
    before = loss_of(pair)
    zeros = {name: layer.weight == 0 for name, layer in pair.student.linears.items()}
    student = distill(pair, tmp_path / "run", {}, lambda done, told: None)
    assert loss_of(pair) < 0.5 * before
    for name, layer in student.linears.items():
        share = 0.5 if name.endswith("down") else 0.0
        assert torch.equal(layer.weight == 0, zeros[name]), name
        assert float(zeros[name].float().mean()) == pytest.approx(share, abs=0.01)
    assert pair.num_zeros == 2 * 64 * 26
    moved = open_pair(*folders, dataclasses.replace(plan, keep_zeros=False), SOURCES, 100)
    assert moved.num_zeros == 0


def test_training_under_rounding_helps_the_rounded_model(
    folders: tuple[Path, Path], tmp_path: Path
):
    """The same model in int4 with what was learned is nearer to its teacher than without."""
    teacher = folders[0]
    plan = dataclasses.replace(
        PLAN, steps=40, learning_rate=0.001, quantization=Quantization.of("int4", 32)
    )
    pair = open_pair(teacher, teacher, plan, SOURCES, save_every=100)
    before = loss_of(pair)
    distill(pair, tmp_path / "run", {}, lambda done, told: None)
    assert loss_of(pair) < 0.7 * before
    rounded = rounded_layers(pair.student)
    assert {name.rpartition(".")[2] for name in rounded} == {
        "qkv",
        "out",
        "gate_up",
        "down",
        "head",
    }
    assert rounded["head"].group == 0 and rounded["layers.0.mlp.down"].group == 32


def test_a_rounded_student_is_written_as_it_was_trained(folders: tuple[Path, Path], tmp_path: Path):
    """compressed-tensors of its parts: q behind k has the rows that the fused matrix has there."""
    plan = dataclasses.replace(PLAN, quantization=Quantization.of("int4", 32))
    student = open_pair(*folders, plan, SOURCES, save_every=100).student
    (tmp_path / "out").mkdir()
    write_student(student, folders[1], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    written: dict[str, Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    spec, rounded = student.spec, rounded_layers(student)
    for part, rows in (
        ("q", slice(0, spec.q_size)),
        ("v", slice(spec.q_size + spec.kv_size, None)),
    ):
        name = f"model.layers.1.self_attn.{part}_proj"
        whole = rounded["layers.1.attention.qkv"]
        packed = written[f"{name}.weight_packed"]
        codes = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)
        assert torch.equal((codes - 8).to(torch.int8), whole.levels_OH[rows])
        assert torch.equal(written[f"{name}.weight_scale"].float(), whole.scales_OG[rows])
    assert written["lm_head.weight_packed"].shape == (211, 16)
    assert "model.norm.weight" in written and "model.embed_tokens.weight" in written


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have multiples of 32 inputs."""
    model = tiny_model("llama", tie_word_embeddings=True, intermediate_size=96)
    folder = save(model, tmp_path_factory.mktemp("even") / "m")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return folder


def test_a_student_that_is_quantized_begins_with_its_own_levels(even: Path, tmp_path: Path):
    """What was written is read again: the levels, the scales, the formats; then it learns on."""
    plan = dataclasses.replace(PLAN, quantization=Quantization.of("int4", 32))
    first = open_pair(even, even, plan, SOURCES, 9).student
    with torch.no_grad():  # scales that rounding to the nearest would not find
        for name, value in first.named_parameters():
            if name.endswith("stretch_OG"):
                value.add_(0.2)
    out = tmp_path / "out"
    out.mkdir()
    write_student(first, even, out)
    formats = spec_of(out).formats
    plan = dataclasses.replace(PLAN, quantization=Quantization.of("none", checkpoint=formats))
    pair = open_pair(even, out, plan, SOURCES, save_every=9)
    before, written = rounded_layers(pair.student), rounded_layers(first)
    assert before.keys() == written.keys()
    for name, weight in written.items():
        assert torch.equal(before[name].levels_OH, weight.levels_OH), name
        assert torch.equal(before[name].scales_OG, weight.scales_OG), name
    assert pair.num_zeros == 0  # level 0 is no weight that was pruned
    start = loss_of(pair)
    run = dataclasses.replace(plan, steps=20, learning_rate=0.001)
    pair = open_pair(even, out, run, SOURCES, save_every=99)
    student = distill(pair, tmp_path / "run", {}, lambda done, told: None)
    assert loss_of(pair) < 0.8 * start
    (tmp_path / "again").mkdir()
    write_student(student, out, tmp_path / "again")
    assert spec_of(tmp_path / "again").formats == formats


def test_formats_that_no_training_writes_are_refused(even: Path, tmp_path: Path):
    """Zeros by name; and a quantized teacher teaches its own numbers."""
    teacher = even
    plan = dataclasses.replace(PLAN, quantization=Quantization.of("int8"))
    student = open_pair(teacher, teacher, plan, SOURCES, 9).student
    out = tmp_path / "int8"
    out.mkdir()
    write_student(student, teacher, out)
    weight = TrainedModel.open(out).linears["layers.1.mlp.down"].weight
    expected = rounded_layers(student)["layers.1.mlp.down"].plain()
    assert torch.equal(weight.detach(), expected)
    for name, format in (("layers.0.mlp.down", Format("fp8")), ("head", INT8)):
        with pytest.raises(HeadwayError, match="not trained"):
            check_trainable_formats(
                out, dataclasses.replace(student.spec, formats=((name, format),))
            )


def test_a_fresh_student_begins_at_random(folders: tuple[Path, Path]):
    plan = dataclasses.replace(PLAN, fresh=True)
    one, other = (open_pair(*folders, plan, SOURCES, 9).student for _ in range(2))
    assert torch.equal(one.decoder.embedding.weight, other.decoder.embedding.weight)
    teacher = TrainedModel.open(folders[0])
    assert not torch.equal(one.decoder.embedding.weight, teacher.decoder.embedding.weight)
    assert bool(torch.isfinite(one.logits(one(ROWS))).all())


def test_other_tokenizers_and_other_plans_are_refused(folders: tuple[Path, Path], tmp_path: Path):
    other = save(tiny_model("llama"), tmp_path / "other")
    (other / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
    with pytest.raises(ModelError, match=r"tokenizers of .* differ \(model"):
        open_pair(folders[0], other, PLAN, SOURCES, 9)
    trained(folders, tmp_path / "run", PLAN)
    with pytest.raises(UsageError, match="a run with plan 6, not 8"):
        trained(folders, tmp_path / "run", dataclasses.replace(PLAN, steps=8))


def test_the_rate_rises_and_falls():
    rate = CosineSchedule(steps=110, peak_lr=1.0, final_lr=0.1, warmup_steps=10)
    assert [rate(0), rate(9), rate(10)] == [0.1, 1.0, 1.0]
    assert rate(60) == pytest.approx(0.55) and rate(110) == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(map(rate, range(10, 110))))


def test_minutes_count_every_sitting(tmp_path: Path):
    """Six rows of 40 seconds by the median pace, 960 in all."""
    rows = [f"{i},{s}" for i, s in enumerate((50, 90, 130, 900, 20, 60))]
    (tmp_path / "loss.csv").write_text("step,seconds\n" + "\n".join(rows))
    assert minutes(tmp_path / "loss.csv") == (pytest.approx(4.0), pytest.approx(16.0))


def test_rates_by_group_and_what_is_held(tmp_path: Path):
    """A group's factor multiplies its rate; `settle` has the last word of each step."""
    module = nn.Linear(2, 1, bias=True)
    module.weight.data.fill_(1.0)
    module.bias.data.fill_(1.0)
    groups = [{"params": [module.weight]}, {"params": [module.bias], "factor": 0.0}]

    def losses(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        loss = module(torch.ones(1, 2)).sum()
        return loss, {"loss": loss}

    def settle() -> None:
        module.weight[0, 1] = 5.0

    run = Training(
        module=module,
        optimizers=[torch.optim.SGD(groups, lr=1.0)],
        steps=2,
        lr=lambda step: 0.5,
        losses=losses,
        names=("loss",),
        clip=0.0,
        settle=settle,
    )
    train(run, tmp_path, {}, lambda done, told: None)
    assert module.weight.tolist() == [[0.0, 5.0]] and module.bias.tolist() == [1.0]
