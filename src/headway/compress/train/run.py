"""One distillation, from two folders to a trained student; the caller writes the folder."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.compress.estimate import BASE_BYTES
from headway.compress.train.data import Mixture, TokenSource
from headway.compress.train.distill import Distillation
from headway.compress.train.loop import CosineSchedule, OnLog, Training, train
from headway.compress.train.model import TrainedModel
from headway.compress.train.student import keep_zeros, make_optimizer, random_student, round_layers
from headway.core.errors import ModelError
from headway.core.regular_file import open_regular
from headway.spec import read_json
from headway.spec.quantization import Quantization

WARMUP_STEPS = 20
FINAL_SHARE = 0.02
"""Final learning rate as a fraction of the peak."""
IGNORED = ("truncation", "padding")
"""Keys of tokenizer.json about truncation and padding of batches, which do not change tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillPlan:
    """What determines the result of a run, besides the folders and the data."""

    steps: int
    step_tokens: int
    row_length: int
    learning_rate: float
    temperature: float = 1.0
    cross_entropy: float = 0.0
    quantization: Quantization = Quantization()
    fresh: bool = False
    keep_zeros: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStudent:
    """Teacher and student at the start of a run; `num_zeros` weights are held at zero."""

    teacher: TrainedModel
    student: TrainedModel
    losses: Distillation
    training: Training
    num_zeros: int


def open_models(
    teacher_folder: Path, student_folder: Path, plan: DistillPlan
) -> tuple[TrainedModel, TrainedModel]:
    """Return (teacher, student); raises HeadwayError if tokenizers differ or weights do not fit."""
    check_same_tokenizer(teacher_folder, student_folder)
    torch.manual_seed(plan.seed)
    teacher = TrainedModel.open(teacher_folder).requires_grad_(False)
    if plan.fresh:
        return teacher, random_student(student_folder, plan.seed)
    return teacher, TrainedModel.open(student_folder)


def prepare(
    teacher: TrainedModel,
    student: TrainedModel,
    plan: DistillPlan,
    sources: list[TokenSource],
    save_every: int,
) -> TeacherStudent:
    """Return the pair with the losses and the optimizer of its training."""
    num_zeros, settle = keep_zeros(student) if plan.keep_zeros else (0, lambda: None)
    round_layers(student, plan.quantization)
    losses = losses_of(teacher, student, plan, sources)
    training = Training(
        module=student,
        optimizers=[make_optimizer(student)],
        steps=plan.steps,
        lr=rate_of(plan),
        losses=losses,
        names=tuple(source.name for source in sources),
        save_every=save_every,
        settle=settle,
    )
    return TeacherStudent(
        teacher=teacher, student=student, losses=losses, training=training, num_zeros=num_zeros
    )


def memory(pair: TeacherStudent) -> int:
    """Estimate the bytes of a step: both models in fp32, the student's gradients and two moments,
    activations per token, and logits. headway-tiny: 1.5 GB.
    """
    spec, mixture = pair.student.spec, pair.losses.mixture
    layer = 20 * spec.hidden_size + 6 * spec.intermediate_size
    token = spec.num_layers * layer + 5 * spec.vocab_size
    weights = pair.teacher.spec.num_parameters + 4 * spec.num_parameters
    return BASE_BYTES + 4 * (weights + mixture.num_rows * mixture.length * token)


def losses_of(
    teacher: TrainedModel, student: TrainedModel, plan: DistillPlan, sources: list[TokenSource]
) -> Distillation:
    """Return the losses of each step."""
    mixture = Mixture(
        sources=sources,
        num_rows=max(1, plan.step_tokens // plan.row_length),
        length=plan.row_length,
        seed=plan.seed,
    )
    return Distillation(
        teacher=teacher,
        student=student,
        mixture=mixture,
        temperature=plan.temperature,
        mix=plan.cross_entropy,
    )


def rate_of(plan: DistillPlan) -> CosineSchedule:
    """Return the schedule: warm-up, then half a cosine."""
    return CosineSchedule(
        steps=plan.steps,
        peak_lr=plan.learning_rate,
        final_lr=plan.learning_rate * FINAL_SHARE,
        warmup_steps=min(WARMUP_STEPS, plan.steps),
    )


def distill(
    pair: TeacherStudent, run: Path, settings: dict[str, Any], report: OnLog
) -> TrainedModel:
    """Train the student, or continue the run in that folder, and return it."""
    train(pair.training, run, settings, report)
    return pair.student


def identity(folder: Path) -> list[object]:
    """Return what identifies a folder: its name, and a hash of its config and weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json" or path.suffix == ".safetensors":
            with open_regular(path) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return [folder.resolve().name, digest.hexdigest()[:16]]


def check_same_tokenizer(teacher: Path, student: Path) -> None:
    """Raise ModelError unless both folders tokenize every text alike."""
    first, second = (read_json(folder / "tokenizer.json") for folder in (teacher, student))
    for key in sorted(first.keys() | second.keys()):
        if key not in IGNORED and first.get(key) != second.get(key):
            raise ModelError(
                f"The tokenizers of {teacher} and {student} differ ({key} of tokenizer.json).",
                "A student learns the distribution over its teacher's tokens: give two folders of "
                "one tokenizer.",
            )
