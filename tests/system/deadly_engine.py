"""An engine process whose runtime is the checking fake, and in which some tokens are deadly.

`python deadly_engine.py FOLDER SOCKETS [cuda|rank]` is what a test's client starts: an engine whose
steps its own thread computes, or a GPU, or another process. A sequence whose prompt holds one of
these tokens shows it once it has `AFTER` tokens:

    DIES        the process is killed
    DIES_ONCE   killed, but not when it is tried again (a file in FOLDER remembers)
    HANGS       the step never ends, and computes nothing
    COMPUTES    the step computes for `LONG_S`, once in a process
    RAISES      the step raises
    SLEEPS      the thread sleeps in a step, as long as `NAPS_S` has it for the next time in FOLDER

On SIGUSR1 its loop stands still wherever it is: an idle engine between two steps.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes import FakeExecutor, make_settings
from headway.core.plan import StepPlan
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.engine.process import serve_engine

DIES, DIES_ONCE, HANGS, RAISES, COMPUTES, SLEEPS = 90, 91, 92, 93, 94, 95
LONG_S = 1.5
NAPS_S = (0.5, 3.0)
RANK = """
import time
while True:
    until_s = time.thread_time() + 0.005
    while time.thread_time() < until_s: pass
    time.sleep(0.05)
"""
"""A rank that computes a little of each moment."""
LONG_STEPS = iter([LONG_S])
AFTER = 3
VOCAB_SIZE, MAX_LEN = 100, 64
STEP_S = 0.005


class DeadlyExecutor(FakeExecutor):
    """The fake, with what the tokens do before each step; the ids of other ranks."""

    awaited: tuple[int, ...] = ()

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


def nap() -> None:
    taken = len(list(Path(sys.argv[1]).glob("nap-*")))
    if taken < len(NAPS_S):
        (Path(sys.argv[1]) / f"nap-{taken}").touch()
        time.sleep(NAPS_S[taken])


def throw() -> None:
    raise RuntimeError("told to raise")


DEEDS: dict[int, Callable[[], None]] = {
    DIES: die,
    DIES_ONCE: die_once,
    HANGS: hang,
    RAISES: throw,
    COMPUTES: compute,
    SLEEPS: nap,
}


def build(_: object) -> Engine:
    settings = make_settings(max_model_len=MAX_LEN, max_num_seqs=16, budget=64, num_blocks=(300,))
    executor = DeadlyExecutor(
        block_size=4, num_blocks=(300,), vocab_size=VOCAB_SIZE, max_num_seqs=16
    )
    if sys.argv[3:] == ["cuda"]:
        settings = replace(settings, device="cuda")
    if sys.argv[3:] == ["rank"]:
        rank = subprocess.Popen([sys.executable, "-c", RANK])
        atexit.register(rank.kill)
        executor.awaited = (rank.pid,)
    return build_engine(executor, settings, vocab_size=VOCAB_SIZE, eos_token_ids=())


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: hang())
    sys.exit(serve_engine(Path(sys.argv[2]), build))
