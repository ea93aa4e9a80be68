"""Makes `headway-tiny` of `headway-base`: tools, schemas and prompts as frameworks send them.

It is given the folder of a finished training run, and continues a run it finds there. Three steps:

    tuned      headway-base, trained on `tune`: knows the new chats, counts and adds worse
    between    SHARE of tuned and the rest of headway-base, weight by weight (Wortsman et al. 2022,
               "Robust fine-tuning of zero-shot models"): nearly as good at either
    tiny       between, trained on `settle` at a low rate

It promises the same files as training, in the folders `headway-tuned` and `headway-tiny`, and a
model that was trained on rows of 4,096 tokens.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from recipes.tiny.checkpoint import weights
from recipes.tiny.model import Shape
from recipes.tiny.train import BASE, TARGET, Plan, arguments, losses, train
from safetensors.torch import load_file, save_file

TUNED = "headway-tuned"
LENGTHS = {"length": 768, "long_length": 4096}
"""A prompt with a tool or a schema has 100 to 700 tokens, which rows of 384 would cut."""
TUNE_STEPS, SETTLE_STEPS = 1250, 300
SETTLE_LR, SETTLE_FINAL_LR, SETTLE_WARMUP = 5e-4, 5e-5, 20
SHARE = 0.6
"""Of the tuned weights in those that settle."""


def mix(base: Path, tuned: Path, out: Path) -> None:
    """Writes SHARE of the weights of `tuned` and the rest of those of `base` as a checkpoint."""
    old, new = (weights(load_file(path)) for path in (base, tuned))
    mixed = {f"model.{name}": torch.lerp(old[name], new[name], SHARE) for name in old}
    save_file(mixed, out, metadata={"step": "0"})


def main() -> None:
    parser = arguments(__doc__, steps=TUNE_STEPS, peak_lr=1.5e-3)
    parser.add_argument("--settle-steps", type=int, default=SETTLE_STEPS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    shape = Shape(**json.loads((args.out / BASE / "training.json").read_text())["shape"])
    longer = replace(shape, max_position_embeddings=LENGTHS["long_length"])
    base, tuned = (args.out / name / "checkpoint.safetensors" for name in (BASE, TUNED))
    plan = Plan(steps=args.steps, seed=args.seed + 2, peak_lr=args.peak_lr, **LENGTHS)
    train(args.out, TUNED, plan, longer, device, losses, chats="tune", begin=base)
    between = args.out / TUNED / "between.safetensors"
    mix(base, tuned, between)
    plan = Plan(
        steps=args.settle_steps,
        seed=args.seed + 4,
        peak_lr=SETTLE_LR,
        final_lr=SETTLE_FINAL_LR,
        warmup_steps=SETTLE_WARMUP,
        **LENGTHS,
    )
    train(args.out, TARGET, plan, longer, device, losses, chats="settle", begin=between)


if __name__ == "__main__":
    main()
