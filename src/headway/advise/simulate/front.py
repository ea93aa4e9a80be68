"""What a request takes outside of steps: doors, parsing, tokens, admission, events on their way.

    sent → at the server's admission → with the engine → in a step → its end → out → read

Calibrated, these are the medians of those of the server's own requests that found nothing to wait
for. Without a calibration they are those of two cores of AMD Zen 5 (docs/simulation.md).

What the server's process computes for a request, a step and a token, and what a load generator does
on the same machine, is work besides (`cores.Cores`): who comes before the work of those before is
done waits for its end, and engines are slower meanwhile where there are fewer cores than compute.
0.1 ms a token holds 10,000 tokens a second, whatever the engine could do.
"""

from dataclasses import dataclass, replace

from headway.perf.frontend import HostCost

DOOR_SHARE = 0.5
"""Of what the client sees beyond the server, so much lies before the request has arrived."""
SERVER = ("request_cpu_s", "step_cpu_s", "token_cpu_s")
CLIENT = ("client_request_cpu_s", "client_step_cpu_s", "client_cpu_s")
"""CPU seconds of the server's process and of a load generator beside it, of `Front`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
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
    beside: float = 0.0
    """By what share a step takes longer for each other engine that is in one, cores aside."""

    @classmethod
    def of(cls, host: HostCost) -> "Front":
        """What was measured; what was not keeps its default."""
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
        """Whether a load generator computes on the same machine."""
        return any(getattr(self, name) for name in CLIENT)

    def scaled(self, scale: float) -> "Front":
        """On a machine that takes so many times as long."""
        names = ("in_s", "out_s", *SERVER, *CLIENT)
        return replace(self, **{name: scale * getattr(self, name) for name in names})

    def without_client(self) -> "Front":
        """The same, asked from other machines."""
        return replace(self, client_request_cpu_s=0.0, client_step_cpu_s=0.0, client_cpu_s=0.0)

    def arrives_s(self, sent_s: float) -> float:
        """When the server has the whole body of a request that left then."""
        return sent_s + DOOR_SHARE * self.door_s

    def judging_s(self, num_prompt: int) -> float:
        """From the body to the engine, past admission."""
        return self.in_s + self.in_token_s * num_prompt

    def read_s(self, ended_s: float, count: int, late_s: float, row_s: float) -> list[float]:
        """When clients read each of so many updates of a step that ended then: all late by
        `late_s`, one `row_s` after the other."""
        out_s, door_s = ended_s + self.out_s, (1 - DOOR_SHARE) * self.door_s
        return [out_s + row_s * place + door_s + late_s for place in range(count)]

    def refused_s(self, judged_s: float) -> float:
        """When a client reads that it was refused."""
        return judged_s + (1 - DOOR_SHARE) * self.door_s


NO_FRONT = Front(in_s=0.0, in_token_s=0.0, out_s=0.0, row_s=0.0, door_s=0.0)
"""An engine alone, without a server."""
