"""Distillation: a student learns the distribution of its teacher (Hinton et al. 2015).

    loss = (1 - mix) · τ² · KL(teacher / τ | student / τ) + mix · cross entropy of the text

weighted by token within a source, and by share over the sources.
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
    """The weighted mean, 0 of nothing."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def divergence(taught_NV: Tensor, student_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """τ² · KL(teacher | student) of each of N positions in nats, from fp32 logits.

    A draft's token is accepted with probability Σ min(p, q) (Leviathan et al. 2023), which is
    1 at divergence 0; by Pinsker's inequality 0.1 nats already keep it above 0.77.
    """
    p = functional.log_softmax(taught_NV / temperature, -1)
    q = functional.log_softmax(student_NV / temperature, -1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def bf16_products() -> AbstractContextManager[object]:
    """bf16 products where this CPU multiplies it, fp32 elsewhere; weights stay in fp32."""
    native = torch.cpu._is_avx512_bf16_supported()
    return torch.autocast("cpu", torch.bfloat16) if native else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The losses of a step: of each source, in the order of the mixture."""

    teacher: TrainedModel
    student: TrainedModel
    mixture: Mixture
    temperature: float = 1.0
    mix: float = 0.0
    products: Callable[[], AbstractContextManager[object]] = bf16_products

    def __call__(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(the loss, that of each source by name)."""
        inputs, targets, weights = self.mixture.batch(step)
        with self.products():
            with torch.no_grad():
                taught_BTH = self.teacher(inputs)
            student_BTH = self.student(inputs)
            sizes = self.mixture.split()
            parts = zip(
                *(x.split(sizes) for x in (taught_BTH, student_BTH, targets, weights)), strict=True
            )
            losses = [self.loss(*part) for part in parts]
        total = torch.stack(losses) @ torch.tensor(self.mixture.shares)
        names = [source.name for source in self.mixture.sources]
        return total, dict(zip(names, losses, strict=True))

    def loss(self, taught: Tensor, student: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Of one source; positions of weight 0 and ids that only one model has play no part."""
        counts = weights > 0
        width = min(self.teacher.spec.vocab_size, self.student.spec.vocab_size)
        with torch.no_grad():
            taught_NV = self.teacher.logits(taught[counts])[:, :width]
        student_NV = self.student.logits(student[counts])[:, :width]
        found = torch.zeros(len(student_NV))
        if self.mix < 1:
            found = (1 - self.mix) * divergence(taught_NV, student_NV, self.temperature)
        if self.mix > 0:
            entropy = functional.cross_entropy(student_NV, targets[counts], reduction="none")
            found = found + self.mix * entropy
        return mean(found, weights[counts])
