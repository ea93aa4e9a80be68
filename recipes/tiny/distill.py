"""Distils `headway-draft`, the draft of `headway-tiny`: five times fewer FLOPs, the same tokenizer.

It is given the folder of a finished training run, and continues a run it finds there. With
`--first` the teacher is `headway-base`; without, `headway-settled`, and the first draft goes on.
`headway-tiny` is a mixture of these two (`tune.py`) and teaches nothing itself.
It promises the same files as training, in the folder `headway-draft`, or `headway-draft-base`.
"""

import argparse
import json
from dataclasses import replace

import torch
import torch.nn.functional as F
from recipes.tiny.model import Llama, Shape
from recipes.tiny.train import BASE, PEAK_LR, arguments, by_source, mean, plan_of, train
from recipes.tiny.tune import LENGTHS, SETTLED
from safetensors.torch import load_file
from torch import Tensor

from headway.compress.train.checkpoint import weights

DRAFT, DRAFT_BASE = "headway-draft", "headway-draft-base"
STEPS_FIRST, STEPS = 1500, 250
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


def given() -> argparse.Namespace:
    """The arguments; steps and learning rate that are not given are those of the stage."""
    parser = arguments(__doc__, steps=STEPS, peak_lr=PEAK_LR / 3)
    parser.add_argument("--first", action="store_true", help="learn from headway-base")
    if parser.parse_args().first:
        parser.set_defaults(steps=STEPS_FIRST, peak_lr=PEAK_LR)
    return parser.parse_args()


def main() -> None:
    args = given()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    source = args.out / (BASE if args.first else SETTLED)
    shape = Shape(**json.loads((source / "training.json").read_text())["shape"])
    teacher = Llama(shape).to(device)
    teacher.load_state_dict(weights(load_file(source / "checkpoint.safetensors")))
    learn = Distillation(teacher)
    smaller = replace(shape, **SIZES)
    if args.first:
        plan = plan_of(args, seed=args.seed + 1)
        train(args.out, DRAFT_BASE, plan, smaller, device, learn)
        return
    plan = plan_of(args, seed=args.seed + 3, **LENGTHS)
    begin = args.out / DRAFT_BASE / "checkpoint.safetensors"
    train(args.out, DRAFT, plan, smaller, device, learn, chats="settle", begin=begin)


if __name__ == "__main__":
    main()
