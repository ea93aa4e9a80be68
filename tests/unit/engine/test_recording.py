"""What an engine predicts of prompts in the record of each step, under every policy."""

import pytest

from headway.core.request import Request, SamplingParams
from headway.engine.policy import POLICIES
from headway.engine.recording import SNAPSHOT_STEPS
from headway.perf.model import Work
from timed import Machine, timed_engine

BUDGET, DECODES = 128, 4


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_tells_what_a_prompt_token_takes(policy: str):
    """Beside four decodes and alone, as the machine takes it in steps of the whole budget."""
    engine, _ = timed_engine(budget=BUDGET, policy=policy)
    for number in range(1, DECODES + 1):
        sampling = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        engine.add(Request(number, [number] * (40 * number), sampling))
    records = [engine.step()[1] for _ in range(200)]
    last = records[-1]
    assert last.num_decode_tokens == DECODES
    machine, read = Machine(), sum(last.kv_tokens_read)
    chunk = BUDGET - DECODES
    work = Work(BUDGET, DECODES + 1, last.attended_tokens + chunk * (chunk + 1) // 2, read + chunk)
    beside_s = machine.seconds(work) / chunk
    alone = Work(BUDGET, 1, BUDGET * (BUDGET + 1) // 2, BUDGET)
    assert last.prefill_s_per_token == pytest.approx(beside_s, rel=0.2)
    assert last.alone_s_per_token == pytest.approx(machine.seconds(alone) / BUDGET, rel=0.2)
    assert last.prefill_s_per_token > last.alone_s_per_token > 0


def test_every_twentieth_record_has_what_the_model_has_learned():
    engine, _ = timed_engine()
    engine.add(Request(1, [1, 2, 3], SamplingParams(max_tokens=90, ignore_eos=True)))
    records = [engine.step()[1] for _ in range(60)]
    having = [record.step for record in records if record.model is not None]
    assert len(having) == 3 and all(step % SNAPSHOT_STEPS == 0 for step in having)
    while engine.has_work and (last := engine.step()[1]).model is None:
        pass
    assert last.model == engine.cost.snapshot() and last.model.num_observed == last.step + 1
