"""Time of a request outside of steps: network, parsing, tokenizing, admission, event streams.

    sent → at the server's admission → with the engine → in a step → its end → out → read

With a calibration these are the medians of the server's own requests that found nothing to wait
for. Without one they are those of two cores of AMD Zen 5 (docs/simulation.md).

The CPU time of the server's process for a request, a step and a token, and that of a load generator
on the same machine, is work besides (`cores.SharedCores`): it queues behind earlier work, and
engines are slower meanwhile where there are fewer cores than computing threads. 0.1 ms a token
limits a server to 10,000 tokens a second, however fast the engine is.
"""

from dataclasses import dataclass, replace

from headway.perf.frontend import HostCost

DOOR_SHARE = 0.5
"""Share of the client's extra latency that lies before the arrival of the request."""
SERVER = ("request_cpu_s", "step_cpu_s", "token_cpu_s")
CLIENT = ("client_request_cpu_s", "client_step_cpu_s", "client_cpu_s")
"""Fields of `FrontendTimes`: CPU seconds of the server's process and of a local load generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendTimes:
    """Seconds, as in `HostCost`."""

    in_s: float = 2.5e-3
    in_token_s: float = 1e-7
    out_s: float = 0.7e-3
    row_s: float = 8e-5
    door_s: float = 1.5e-3
    request_cpu_s: float = 0.0
    step_cpu_s: float = 0.0
    token_cpu_s: float = 0.0
    client_request_cpu_s: float = 0.0
    client_step_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    num_cores: int = 0
    interference: float = 0.0
    """Share by which a step takes longer for each other engine that is in a step, cores aside."""

    @classmethod
    def of(cls, host: HostCost) -> "FrontendTimes":
        """Return the measured times; those that were not measured keep their defaults."""
        usual = cls()
        return cls(
            in_s=usual.in_s if host.in_s is None else host.in_s,
            in_token_s=host.in_token_s,
            out_s=usual.out_s if host.out_s is None else host.out_s,
            row_s=host.row_s or usual.row_s,
            door_s=usual.door_s if host.door_s is None else host.door_s,
            request_cpu_s=host.request_cpu_s,
            step_cpu_s=host.step_cpu_s,
            token_cpu_s=host.token_cpu_s,
            client_request_cpu_s=host.client_request_cpu_s,
            client_step_cpu_s=host.client_step_cpu_s,
            client_cpu_s=host.client_cpu_s,
            num_cores=host.num_cores,
        )

    @property
    def has_client(self) -> bool:
        """Return whether a load generator computes on the same machine."""
        return any(getattr(self, name) for name in CLIENT)

    def scaled(self, scale: float) -> "FrontendTimes":
        """Return the times on a machine that is slower by the factor `scale`."""
        names = ("in_s", "out_s", *SERVER, *CLIENT)
        return replace(self, **{name: scale * getattr(self, name) for name in names})

    def without_client(self) -> "FrontendTimes":
        """Return the same server with its clients on other machines."""
        return replace(self, client_request_cpu_s=0.0, client_step_cpu_s=0.0, client_cpu_s=0.0)

    def arrives_s(self, sent_s: float) -> float:
        """Return when the server has the whole body of a request that left at `sent_s`."""
        return sent_s + DOOR_SHARE * self.door_s

    def judging_s(self, num_prompt: int) -> float:
        """Return the seconds from the body to the engine, admission included."""
        return self.in_s + self.in_token_s * num_prompt

    def read_s(self, ended_s: float, count: int, late_s: float, row_s: float) -> list[float]:
        """Return when clients read each of `count` updates of a step that ended at `ended_s`.

        All are late by `late_s`, and each follows the one before it by `row_s`.
        """
        out_s, door_s = ended_s + self.out_s, (1 - DOOR_SHARE) * self.door_s
        return [out_s + row_s * place + door_s + late_s for place in range(count)]

    def refused_s(self, judged_s: float) -> float:
        """Return when a client reads its rejection."""
        return judged_s + (1 - DOOR_SHARE) * self.door_s


NO_FRONT = FrontendTimes(in_s=0.0, in_token_s=0.0, out_s=0.0, row_s=0.0, door_s=0.0)
"""An engine alone, without a server."""
