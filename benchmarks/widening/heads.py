"""Medusa heads of the small model, so that they guess the same from the widened one's states.

After the last norm the copies of the stream add up to the small model's state (docs/widen.md). A
block reads all of them and writes into the first, so they go on adding up to what its head says:

    weight    W W W 0        bias  b      x + SiLU(W · (x0 + x1 + x2) + b)  in copy 0
              0 0 0 0              0      x + SiLU(0) = x                   elsewhere
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.runtime.checkpoint_files import MEDUSA_FILE
from headway.runtime.medusa_file import read_medusa_spec
from widening.plan import Widening


def widen_heads(folder: Path, plan: Widening, out: Path) -> None:
    """Write the heads that lie in `folder` for the widened model, where they share its output.

    Heads with an output of their own are left out. Raises CheckpointError for a file that is wrong.
    """
    medusa = read_medusa_spec(folder, plan.small)
    if medusa is None or not medusa.shares_head:
        return
    copies, width = plan.copies(0), plan.large.hidden_size
    tensors: dict[str, Tensor] = {}
    with safe_open(folder / MEDUSA_FILE, framework="pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118
            small = file.get_tensor(name)
            tensors[name] = torch.zeros([width] * small.dim(), dtype=small.dtype)
            if small.dim() == 1:
                tensors[name][copies[0]] = small
            else:
                for copy in copies:
                    tensors[name][copies[0], copy] = small
    save_file(tensors, out / MEDUSA_FILE, metadata=metadata)
