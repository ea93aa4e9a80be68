"""Disaggregation: prefill and decode in different simulated engines, as `frontend.pools` has it.

The engines are the server's own, parcels and restores included; a link has its bytes a second, and
each pair of engines one of its own. Worked example, Llama 3.1 8B on two H100, 4,096 tokens:

    computed     4,096 x 16 GFLOP over half of 989 TFLOP/s      133 ms
    handed over  4,096 x 131 kB over 50 GB/s                     11 ms
"""

from headway.advise.simulate.executor import SimulatedExecutor
from headway.advise.simulate.front import FrontendTimes
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.replica import FinishedStep, SimulatedReplica
from headway.bench.prompts import IdWriter
from headway.engine.handover import Handover
from headway.perf.rates import ReadRate

MARK = b"simulated"
RELAY_S = 1e-3
"""Seconds from the prefill engine through the server to the decode engine."""


class SimulatedPools(World):
    """A world whose first `num_prefill` replicas compute prompts; the others decode."""

    def __init__(
        self,
        replicas: list[SimulatedReplica],
        num_prefill: int,
        front: FrontendTimes,
        writer: IdWriter,
        clients: Clients,
        seed: int,
        *,
        link_bytes_s: float,
    ) -> None:
        assert 0 < num_prefill < len(replicas)
        super().__init__(replicas, front, writer, clients, seed)
        self.decoding = replicas[num_prefill:]
        lengths = replicas[0].lengths
        for number, replica in enumerate(replicas):
            replica.lengths = replica.script.lengths = lengths
            replica.hands_over = number < num_prefill
            join(replica, str(number), 1 / link_bytes_s)
        self.door.admission.queues.on_roles([replica.hands_over for replica in replicas])

    def _finish_step(self, replica: SimulatedReplica, stepped: FinishedStep) -> None:
        super()._finish_step(replica, stepped)
        for number, parcel in stepped.handed:
            self._hand_over(replica, number, parcel, stepped.ends_s)

    def _hand_over(
        self, replica: SimulatedReplica, number: int, parcel: bytes, now_s: float
    ) -> None:
        """Hand a request over to the decode engine with the fewest requests."""
        job = replica.jobs.pop(number, None)
        if job is None:  # its client has left
            return
        target = min(self.decoding, key=lambda each: len(each.jobs))
        made = sum(job.chunk_tokens)  # an engine counts an answer whole, where it ends
        replica.num_tokens += made
        target.num_tokens -= made
        due_s = now_s + RELAY_S
        target.take(due_s, job, parcel, replica.started_s)
        self.door.admission.queues.on_handover(number, self.replicas.index(target))
        self.at(due_s, self._step, target, due_s)


def join(replica: SimulatedReplica, name: str, byte_s: float) -> None:
    """Let a replica hand over and take over, at `byte_s` seconds a byte, which it knows."""
    engine, executor = replica.engine, replica.engine.executor
    replica.handover = Handover(engine, MARK, name)
    assert engine.kv.tiers is not None
    engine.kv.tiers.engine_rate = ReadRate(byte_s)
    if isinstance(executor, SimulatedExecutor):
        executor.handover_byte_s = byte_s
