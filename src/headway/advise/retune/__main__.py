"""`python -m headway.advise.retune`: answers a server's questions until it closes the pipe.

At a low priority: it gets what engine and server leave of the cores, and where they leave nothing a
tenth of one.
"""

import os
import signal
import sys
from typing import BinaryIO

from headway.advise.retune.question import LENGTH_BYTES, decode_question, encoded
from headway.advise.retune.trial import answer

NICE = 10
"""Linux gives it one share in ten beside a thread that never waits, and with 19 one in seventy: a
question of 8 s of CPU then takes minutes, and is answered when the traffic is another."""


def main(questions: BinaryIO, answers: BinaryIO) -> None:
    """One answer for each question."""
    while length := questions.read(LENGTH_BYTES):
        asked = decode_question(questions.read(int.from_bytes(length, "big")))
        answers.write(encoded(answer(asked)))
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which closes the pipe
    os.nice(NICE)
    main(sys.stdin.buffer, sys.stdout.buffer)
