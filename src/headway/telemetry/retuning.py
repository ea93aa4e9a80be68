"""What `--retune` shows of itself in `/stats`."""

import msgspec

from headway.core.live_settings import Changes

WATCHED, KEPT, ROLLED_BACK, UNPROVED = "watched", "kept", "rolled_back", "unproved"
OUTCOMES = (KEPT, ROLLED_BACK, UNPROVED)


class Retune(msgspec.Struct, kw_only=True):
    """One change. Shares are of requests in their objectives: `before` it, `predicted` and
    `expected` without it for the traffic that came since, `after` it; `why` in a sentence.

    `at_s` is on the scale of `now_s`; `outcome` is watched until it is known.
    """

    at_s: float
    changes: Changes
    was: Changes
    outcome: str = WATCHED
    predicted_gain: float
    gain_interval: tuple[float, float]
    before: float
    expected: float | None = None
    after: float | None = None
    num_requests: int = 0
    why: str = ""


class AskedOf(msgspec.Struct, kw_only=True):
    """One question. Shares are of the requests of the `seconds` before it: `seen`, and `simulated`
    with the settings of then; of a change that is watched only what the old ones are simulated to
    have made of them. `at_s` is on the scale of `now_s`."""

    at_s: float
    seen: float | None
    simulated: float
    seconds: float
    num_requests: int
    cpu_s: float
    why: str


class Retuning(msgspec.Struct, kw_only=True):
    """All that `--retune` has done. `state` in a sentence; `settings` are those that may change, as
    they are, `started` as they were; `changes` and `asked` the last 20, the newest last. `cpu_s` is
    what its process has computed."""

    state: str = "waits for traffic"
    settings: Changes = {}
    started: Changes = {}
    changes: list[Retune] = []
    asked: list[AskedOf] = []
    num_simulated: int = 0
    cpu_s: float = 0.0
