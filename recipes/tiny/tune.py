"""Makes `headway-tiny` of `headway-base`: tools, schemas and prompts as frameworks send them.

It is given the folder of a finished training run, and continues a run it finds there. Its steps:

    tuned      headway-base, trained on `tune`: knows the new chats, counts and adds worse
    between    0.6 of tuned and 0.4 of headway-base, weight by weight (Wortsman et al. 2022,
               "Robust fine-tuning of zero-shot models"): nearly as good at either
    settled    between, trained on `settle` at a low rate
    tiny       0.8 of settled and 0.2 of headway-base

It promises, in the folders `headway-tuned`, `headway-settled` and `headway-tiny`, the same files as
training, and a model that was trained on rows of 4,096 tokens.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from recipes.tiny.model import Shape
from recipes.tiny.train import BASE, TARGET, Plan, arguments, losses, plan_of, train
from safetensors.torch import load_file, save_file

from headway.compress.train.checkpoint import weights

TUNED, SETTLED = "headway-tuned", "headway-settled"
LENGTHS = {"length": 768, "long_length": 4096}
"""A prompt with a tool or a schema has 100 to 700 tokens, which rows of 384 would cut."""
TUNE_STEPS, SETTLE_STEPS = 1250, 250
SETTLE_LR, SETTLE_FINAL_LR, SETTLE_WARMUP = 5e-4, 5e-5, 20
TUNED_SHARE, SETTLED_SHARE = 0.6, 0.8
"""Of the tuned weights in those that settle, and of the settled ones in `headway-tiny`."""


def mix(base: Path, other: Path, share: float, out: Path) -> None:
    """Writes `share` of the weights of `other` and the rest of those of `base` as a checkpoint."""
    old, new = (weights(load_file(path)) for path in (base, other))
    mixed = {f"model.{name}": torch.lerp(old[name], new[name], share) for name in old}
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
    plan = plan_of(args, seed=args.seed + 2, **LENGTHS)
    train(args.out, TUNED, plan, longer, device, losses, chats="tune", begin=base)
    between = args.out / TUNED / "between.safetensors"
    mix(base, tuned, TUNED_SHARE, between)
    plan = Plan(
        steps=args.settle_steps,
        seed=args.seed + 4,
        step_tokens=args.step_tokens,
        peak_lr=SETTLE_LR,
        final_lr=SETTLE_FINAL_LR,
        warmup_steps=SETTLE_WARMUP,
        **LENGTHS,
    )
    train(args.out, SETTLED, plan, longer, device, losses, chats="settle", begin=between)
    finish(args.out, base)


def finish(out: Path, base: Path) -> None:
    """Fills the folder of `headway-tiny`: the last mixture, and the records of what settled."""
    (out / TARGET).mkdir(exist_ok=True)
    settled = out / SETTLED / "checkpoint.safetensors"
    mix(base, settled, SETTLED_SHARE, out / TARGET / "checkpoint.safetensors")
    for record in ("training.json", "loss.csv"):
        shutil.copy(out / SETTLED / record, out / TARGET)


if __name__ == "__main__":
    main()
