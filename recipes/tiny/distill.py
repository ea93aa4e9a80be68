"""Distils `headway-draft` from `headway-tiny`: five times fewer FLOPs, the same tokenizer.

It is given the folder of a finished training run, and continues a run it finds there.
It promises, in the folder `headway-draft` of it, the same files as training.
"""

import json

import torch
import torch.nn.functional as F
from recipes.tiny.checkpoint import weights
from recipes.tiny.model import Llama, Shape
from recipes.tiny.train import TARGET, arguments, by_source, mean, plan_of, train
from safetensors.torch import load_file
from torch import Tensor

DRAFT = "headway-draft"
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class Distillation:
    """The divergence of a student from its teacher, KL(teacher | student), in nats.

    A draft's token is accepted with probability Σ min(p, q) (Leviathan et al. 2023), which is
    1 at divergence 0; by Pinsker's inequality 0.1 nats already keep it above 0.77.
    """

    def __init__(self, teacher: Llama) -> None:
        self.teacher = teacher.eval().requires_grad_(False)

    def __call__(
        self, student: Llama, inputs: Tensor, targets: Tensor, weights: Tensor
    ) -> list[Tensor]:
        """The weighted mean of either corpus; targets are not looked at."""
        means = []
        with torch.no_grad():
            taught = self.teacher(inputs)
        for truth, drafted, weight in by_source(taught, student(inputs), weights):
            learned = weight > 0
            p = F.log_softmax(self.teacher.logits(truth[learned]).float(), -1)
            q = F.log_softmax(student.logits(drafted[learned]).float(), -1)
            means.append(mean((p.exp() * (p - q)).sum(-1), weight[learned]))
        return means


def main() -> None:
    args = arguments(__doc__, steps=1500).parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    shape = Shape(**json.loads((args.out / TARGET / "training.json").read_text())["shape"])
    teacher = Llama(shape).to(device)
    teacher.load_state_dict(weights(load_file(args.out / TARGET / "checkpoint.safetensors")))
    plan = plan_of(args, seed=args.seed + 1)
    smaller = Shape(vocab_size=shape.vocab_size, **SIZES)
    train(args.out, DRAFT, plan, smaller, device, Distillation(teacher))


if __name__ == "__main__":
    main()
