"""An engine process whose runtime is the checking fake, and in which some tokens are deadly.

`python deadly_engine.py FOLDER SOCKETS` is what a test's client starts. A sequence whose prompt
holds one of these tokens shows it once it has `AFTER` tokens:

    DIES        the process is killed
    DIES_ONCE   killed, but not when it is tried again (a file in FOLDER remembers)
    HANGS       the step never ends, and computes nothing
    COMPUTES    the step computes for `LONG_S`, once in a process
    RAISES      the step raises
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes import FakeExecutor, make_settings
from headway.core.plan import StepPlan
from headway.engine.engine import Engine
from headway.engine.process import serve_engine

DIES, DIES_ONCE, HANGS, RAISES, COMPUTES = 90, 91, 92, 93, 94
LONG_S = 1.5
LONG_STEPS = iter([LONG_S])
AFTER = 3
VOCAB_SIZE, MAX_LEN = 100, 64
STEP_S = 0.005


class DeadlyExecutor(FakeExecutor):
    """The fake, with what the tokens do before each step."""

    def submit(self, plan: StepPlan) -> None:
        time.sleep(STEP_S)
        super().submit(plan)
        for row in plan.scheduled:
            sequence = self.sequences[row.sequence_id]
            prompt = sequence.new.token_ids[: sequence.new.num_prompt_tokens]
            if len(sequence.tokens) - len(prompt) >= AFTER:
                for token in prompt:
                    DEEDS.get(token, harmless)()


def harmless() -> None:
    pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once() -> None:
    mark = Path(sys.argv[1]) / "died"
    if not mark.exists():
        mark.touch()
        die()


def hang() -> None:
    time.sleep(3600)


def compute() -> None:
    until_s = time.thread_time() + next(LONG_STEPS, 0.0)
    while time.thread_time() < until_s:
        pass


def throw() -> None:
    raise RuntimeError("told to raise")


DEEDS: dict[int, Callable[[], None]] = {
    DIES: die,
    DIES_ONCE: die_once,
    HANGS: hang,
    RAISES: throw,
    COMPUTES: compute,
}


def build(_: object) -> Engine:
    settings = make_settings(max_model_len=MAX_LEN, max_num_seqs=16, budget=64, num_blocks=(300,))
    executor = DeadlyExecutor(
        block_size=4, num_blocks=(300,), vocab_size=VOCAB_SIZE, max_num_seqs=16
    )
    return Engine(executor, settings, vocab_size=VOCAB_SIZE, eos_token_ids=())


if __name__ == "__main__":
    sys.exit(serve_engine(Path(sys.argv[2]), build))
