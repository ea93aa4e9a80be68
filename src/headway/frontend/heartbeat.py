"""What the heartbeats of an engine process tell: a step that hangs, messages that nobody takes."""

from headway.engine.messages import BEAT_INTERVAL_S, Beat

IDLE = Beat(0.0, 0.0)
HANGS = 10
"""A step that computes nothing hangs after --step-timeout. One that computes does so when it has
computed for that long, and for so many times longer than any took before; or has taken so many
times that long on a machine that gives it no time."""


class Heartbeat:
    """The last beat of an engine process, and how long it has left messages where they are.

    Who is held between two steps is busy with nothing; but it takes nothing either. Beats every
    0.5 s behind a message that is sent between the first two of them:

        taken before, and since    4 of 4, 4 of 5, 4 of 5, 4 of 5
        waits                      0, 0, 0.5 s, 1 s
    """

    def __init__(self) -> None:
        self.last = IDLE
        self.num_sent = 0
        """Messages to the process, of which the beats say how many it has taken."""
        self._num_sent_before, self._waits_s = 0, 0.0

    def hear(self, beat: Beat) -> None:
        """Another beat has come."""
        waits = beat.num_taken == self.last.num_taken < self._num_sent_before
        self._waits_s = self._waits_s + BEAT_INTERVAL_S if waits and not beat.busy_s else 0.0
        self.last, self._num_sent_before = beat, self.num_sent

    def trouble(self, step_timeout_s: float) -> str | None:
        """Why a process that is ready does not go on, or None."""
        beat = self.last
        if beat.still_s >= step_timeout_s:
            return f"computed nothing of its step for {beat.still_s:.1f} s"
        if self._waits_s >= step_timeout_s:
            return f"took no message for {self._waits_s:.1f} s"
        longest_s = max(step_timeout_s, HANGS * beat.longest_s)
        most_s = HANGS * max(step_timeout_s, beat.longest_s)
        if beat.computed_s > longest_s or beat.busy_s > most_s:
            return f"was in one step for {beat.busy_s:.1f} s"
        return None
