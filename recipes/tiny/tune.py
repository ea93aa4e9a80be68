"""Makes `headway-tiny` of `headway-base`: tools, schemas and prompts as frameworks send them.

It is given the folder of a finished training run, and continues a run it finds there.
It promises, in the folder `headway-tiny` of it, the same files as training, and a model that was
trained on rows of 4,096 tokens. Half of its chats are those it was trained on before.
"""

import json
from dataclasses import replace

import torch
from recipes.tiny.model import Shape
from recipes.tiny.train import BASE, TARGET, Plan, arguments, losses, train

LENGTHS = {"length": 768, "long_length": 4096}
"""A prompt with a tool or a schema has 100 to 700 tokens, which rows of 384 would cut."""


def main() -> None:
    args = arguments(__doc__, steps=2000, peak_lr=1.5e-3).parse_args()
    torch.set_num_threads(args.threads)
    shape = Shape(**json.loads((args.out / BASE / "training.json").read_text())["shape"])
    longer = replace(shape, max_position_embeddings=LENGTHS["long_length"])
    plan = Plan(steps=args.steps, seed=args.seed + 2, peak_lr=args.peak_lr, **LENGTHS)
    begin = args.out / BASE / "checkpoint.safetensors"
    device = torch.device(args.device)
    train(args.out, TARGET, plan, longer, device, losses, chats="tune", begin=begin)


if __name__ == "__main__":
    main()
