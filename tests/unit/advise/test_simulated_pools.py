"""Prompts and answers in different simulated engines: every answer whole, and times that add up."""

import pytest

from headway.advise.simulate.front import NO_FRONT
from headway.advise.simulate.loop import Clients
from headway.advise.simulate.pools import RELAY_S, SimulatedPools
from headway.advise.simulate.replica import SimulatedReplica
from headway.bench.prompts import IdWriter
from simulated_house import Formula, poisson, served, talks, world

STEP_S, TOKEN_S = 0.01, 0.001
BLOCK_BYTES, LINK_BYTES_S = 16_000, 1e6
"""A block of 16 tokens takes 16 ms on the link, and to compute as well."""


def pools(prefill=1, decode=1, *, link=LINK_BYTES_S, timeout_s=600.0, **how) -> SimulatedPools:
    setup = served(prefix_cache="lfu", block_bytes=(BLOCK_BYTES,), **how)
    made = [SimulatedReplica(setup, Formula(STEP_S, TOKEN_S)) for _ in range(prefill + decode)]
    clients = Clients(timeout_s=timeout_s)
    return SimulatedPools(made, prefill, NO_FRONT, IdWriter(0), clients, seed=1, link_bytes_s=link)


def test_a_first_token_comes_before_the_hand_over_and_the_next_one_behind_it():
    made = pools()
    (x,) = made.run(talks([0.0], prompt=160, answer=3))
    first_s, second_s, third_s = x.chunk_s
    assert first_s == pytest.approx(STEP_S + 160 * TOKEN_S)
    ten_blocks_s = 10 * BLOCK_BYTES / LINK_BYTES_S
    behind_s = RELAY_S + ten_blocks_s + STEP_S + TOKEN_S
    assert second_s - first_s == pytest.approx(behind_s, abs=0.005)
    assert third_s - second_s == pytest.approx(STEP_S + TOKEN_S, abs=0.001)
    prefill, decode = made.replicas
    assert (prefill.num_tokens, decode.num_tokens) == (1, 2)


def test_a_slow_link_is_not_taken():
    """Where computing is predicted to be faster the prompt is computed again."""
    made = pools(link=1e3)
    (x,) = made.run(talks([0.0], prompt=160, answer=2))
    first_s, second_s = x.chunk_s
    assert second_s - first_s == pytest.approx(RELAY_S + STEP_S + 161 * TOKEN_S, abs=0.01)


def test_all_answers_are_whole_and_nobody_holds_a_block():
    made = pools(2, 2, link=1e9)
    result = made.run(talks(poisson(8.0, 60), prompt=100, answer=9))
    assert [x.output_tokens for x in result] == [9] * 60
    assert all(x.ok for x in result)
    assert {replica.num_tokens > 0 for replica in made.replicas} == {True}
    assert sum(replica.num_tokens for replica in made.replicas[:2]) == 60
    for replica in made.replicas:
        assert not replica.jobs
        replica.engine.check_integrity()
    made.door.admission.check_integrity()
    assert [line.num_requests for line in made.door.admission.queues.by_engine] == [0] * 4


def test_an_answer_of_one_token_and_who_leaves_end_where_they_began():
    made = pools(timeout_s=0.15)
    result = made.run(talks([0.0, 1.0, 2.0], prompt=100, answer=1) + talks([3.0], answer=100))
    assert [x.output_tokens for x in result[:3]] == [1, 1, 1]
    assert result[3].error == "timeout"
    for replica in made.replicas:
        assert not replica.jobs
        replica.engine.check_integrity()


def test_decodes_are_not_held_up_by_prompts():
    """In one engine a prompt's chunk stands in every step; apart the answers never see one."""
    load = talks(poisson(3.0, 40), prompt=500, answer=30)
    apart = pools(1, 1, link=1e12).run(load)
    truth = Formula(STEP_S, TOKEN_S)
    together = world(truth, served(prefix_cache="lfu"), replicas=2).run(load)

    def longest_gap(result):
        return max(
            b - a for x in result for a, b in zip(x.chunk_s[1:], x.chunk_s[2:], strict=False)
        )

    assert longest_gap(apart) < 0.1 < longest_gap(together)
