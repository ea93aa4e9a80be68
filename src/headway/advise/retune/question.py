"""What a server asks the process beside it, and what that answers: JSON, each behind its length."""

from typing import Literal

import msgspec

from headway.core.live_settings import Changes
from headway.core.resolve import Settings
from headway.telemetry.calibration import Calibration
from headway.telemetry.traffic import Stretch

LENGTH_BYTES = 8
MOST_BYTES = 64 * 2**20


class Begun(msgspec.Struct, array_like=True):
    """A request that was not over when a simulation begins: it had come `age_s` before, waited or
    ran, and has `answer` tokens of each of its `n` answers before it; what it has is prompt."""

    age_s: float
    runs: bool
    prompt: int
    cached: int
    answer: int
    n: int = 1
    service_class: str = ""


class Question(msgspec.Struct, kw_only=True):
    """`propose` better settings for the traffic of late, or `judge` what the settings with
    `changes` undone would have made of it. The calibration has the steps; its traffic is not
    read."""

    kind: Literal["propose", "judge"]
    calibration: Calibration
    stretch: Stretch
    started: Settings
    """What the server started with: it bounds what may be tried."""
    changes: Changes = {}
    """Of `judge`: back to what was before."""
    begun: list[Begun] = []
    """Of `judge`: who was under way before the change."""
    left_alone: list[Changes] = []
    """Of `propose`: what was rolled back of late."""


class Answer(msgspec.Struct, kw_only=True):
    """`changes` is {} where nothing is clearly better, as `why` then says.

    Shares are of requests in their objectives: `now` with the present settings, `then` with the
    others, `seen` what the server made of the requests of `now`, None where nobody knows; `gain` =
    then / now − 1 with its 90%, machine and arrivals in it. Seconds are medians. `begun` are those
    who were under way when the simulation of `seconds` began.
    """

    changes: Changes = {}
    why: str = ""
    is_trusted: bool = True
    """Whether the simulation of the present settings says about what was seen."""
    now: float = 0.0
    then: float = 0.0
    seen: float | None = None
    gain: float = 0.0
    gain_interval: tuple[float, float] = (0.0, 0.0)
    now_ttft_s: float | None = None
    now_tpot_s: float | None = None
    then_ttft_s: float | None = None
    then_tpot_s: float | None = None
    begun: list[Begun] = []
    seconds: float = 0.0
    num_requests: int = 0
    num_simulated: int = 0
    cpu_s: float = 0.0


def encoded(message: Question | Answer) -> bytes:
    """Its bytes behind their length."""
    body = msgspec.json.encode(message, enc_hook=float)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


decode_question = msgspec.json.Decoder(Question).decode
decode_answer = msgspec.json.Decoder(Answer).decode
