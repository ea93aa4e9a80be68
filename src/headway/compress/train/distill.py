"""Distillation: a student learns the distribution of its teacher (Hinton et al. 2015).

    loss = (1 - mix) · τ² · KL(teacher / τ | student / τ) + mix · cross entropy of the text

It is weighted by token within a source, and by share over the sources.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.compress.train.data import Mixture
from headway.compress.train.model import TrainedModel


def mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean; 0 for no values."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def divergence(teacher_NV: Tensor, student_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return τ² · KL(teacher | student) at each of N positions in nats, from fp32 logits.

    A draft token is accepted with probability Σ min(p, q) (Leviathan et al. 2023), which is 1 at
    divergence 0; by Pinsker's inequality it is above 0.77 at 0.1 nats.
    """
    p = functional.log_softmax(teacher_NV / temperature, -1)
    q = functional.log_softmax(student_NV / temperature, -1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def bf16_products() -> AbstractContextManager[object]:
    """Multiply in bf16 if the CPU does so natively, else in fp32; weights stay in fp32."""
    native = torch.cpu._is_avx512_bf16_supported()
    return torch.autocast("cpu", torch.bfloat16) if native else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The losses of a step for each source, in the order of the mixture."""

    teacher: TrainedModel
    student: TrainedModel
    mixture: Mixture
    temperature: float = 1.0
    mix: float = 0.0
    products: Callable[[], AbstractContextManager[object]] = bf16_products

    def __call__(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (the loss, that of each source by name)."""
        inputs, targets, weights = self.mixture.batch(step)
        with self.products():
            with torch.no_grad():
                teacher_BTH = self.teacher(inputs)
            student_BTH = self.student(inputs)
            sizes = self.mixture.split()
            parts = zip(
                *(x.split(sizes) for x in (teacher_BTH, student_BTH, targets, weights)), strict=True
            )
            losses = [self.loss(*part) for part in parts]
        total = torch.stack(losses) @ torch.tensor(self.mixture.shares)
        names = [source.name for source in self.mixture.sources]
        return total, dict(zip(names, losses, strict=True))

    def loss(self, teacher: Tensor, student: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the loss of one source; positions of weight 0 and ids of one model alone are
        skipped."""
        counts = weights > 0
        width = min(self.teacher.spec.vocab_size, self.student.spec.vocab_size)
        with torch.no_grad():
            teacher_NV = self.teacher.logits(teacher[counts])[:, :width]
        student_NV = self.student.logits(student[counts])[:, :width]
        losses = torch.zeros(len(student_NV))
        if self.mix < 1:
            losses = (1 - self.mix) * divergence(teacher_NV, student_NV, self.temperature)
        if self.mix > 0:
            entropy = functional.cross_entropy(student_NV, targets[counts], reduction="none")
            losses = losses + self.mix * entropy
        return mean(losses, weights[counts])
