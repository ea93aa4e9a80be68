"""What is told of drafts: counters under vLLM's names, by source beside them, windows, timings."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.core.clock import VirtualClock
from headway.core.plan import Description
from headway.telemetry.stats import take_snapshot
from telemetry_cases import Ready, answer, begin, ceilings, step, telemetry

SPECULATES = {"prefix_cache": "lfu", "speculate": "lookup,draft", "max_drafts": "4"}
VERIFIED = [("lookup", 4, 2), ("draft", 3, 3), ("draft", 1, 0)]
"""Three of the four sequences of a step: 8 draft tokens, 5 of them accepted."""


def drafting(clock, **more):
    """A model of a server that speculates."""
    model = telemetry(clock, **more)
    description = Description(device="cpu", name="made up", ceilings=ceilings())
    model.on_ready(Ready(description, settings=dict(SPECULATES)))
    return model


def drafted(number=0, **more):
    """A step of 4 decodes and 8 draft tokens; 2 of its 10 ms were drafting, 3 verifying."""
    given = {"num_tokens": 12, "num_sampled": 12, "num_decode_tokens": 12, "num_drafts": 8}
    told = {"num_kept_drafts": 5, "draft_s": 0.002, "verify_s": 0.003, "verified": VERIFIED}
    return step(number, **{**given, **told, **more})


def samples(model):
    """{(name without prefix, labels but the common ones): value} of all counters of drafts."""
    found = {}
    for family in text_string_to_metric_families(model.render().decode()):
        for each in family.samples:
            name = each.name.partition(":spec_decode_")[2]
            labels = {k: v for k, v in each.labels.items() if k not in ("model_name", "engine")}
            if name and not name.endswith("_created"):
                found[name, tuple(labels.items())] = each.value
    return found


@pytest.mark.parametrize("prefix", ["headway", "vllm"])
def test_the_counters_have_vllms_names_and_labels(prefix):
    """`position` from 0 is vLLM's only label; what is by source has names of its own."""
    model = drafting(VirtualClock(), prefix=prefix)
    model.on_step(drafted())
    model.on_step(step(1))
    found = samples(model)
    assert found["num_drafts_total", ()] == 3
    assert found["num_draft_tokens_total", ()] == 8
    assert found["num_accepted_tokens_total", ()] == 5
    by_position = {
        at: found["num_accepted_tokens_per_pos_total", (("position", at),)] for at in "0123"
    }
    assert by_position == {"0": 2, "1": 2, "2": 1, "3": 0}
    for source, tokens, accepted in (("lookup", 4, 2), ("draft", 4, 3)):
        assert found["num_draft_tokens_by_source_total", (("source", source),)] == tokens
        assert found["num_accepted_tokens_by_source_total", (("source", source),)] == accepted
    assert found["draft_seconds_total", ()] == pytest.approx(0.002)
    assert found["verify_seconds_total", ()] == pytest.approx(0.003)


def test_series_are_there_before_the_first_draft_and_only_where_somebody_guesses():
    """A rate over a series that begins with its first draft would miss that draft."""
    by_label = [key for key in samples(drafting(VirtualClock())) if key[1]]
    assert len(by_label) == 4 + 2 * 2
    assert [key for key in samples(telemetry(VirtualClock())) if key[1]] == []


def test_a_window_says_what_came_and_what_it_took():
    """4 sequences gained 9 tokens in 10 ms, of which 5 ms went to drafts."""
    clock = VirtualClock(now_s=10.0)
    model = drafting(clock)
    model.on_step(drafted())
    found = model.window(60).drafts
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (3, 8, 5)
    assert (found.acceptance, found.drafts_per_step) == (5 / 8, 2.0)
    assert found.tokens_per_step == 2.25 == 1 + found.drafts_per_step * found.acceptance
    assert (found.draft_share, found.verify_share) == pytest.approx((0.2, 0.3))
    assert found.speedup == pytest.approx(2.25 / 2)
    assert {
        name: (s.drafts, s.draft_tokens, s.accepted_tokens) for name, s in found.by_source.items()
    } == {
        "lookup": (1, 4, 2),
        "draft": (2, 4, 3),
    }


def test_the_speedup_is_of_steps_without_prefill():
    """A prompt beside the decodes makes a step long for another reason than their drafts."""
    model = drafting(VirtualClock(now_s=10.0))
    model.on_step(drafted())
    model.on_step(drafted(1, num_tokens=112, execute_s=0.9))
    found = model.window(60).drafts
    assert found.speedup == pytest.approx(2.25 / 2)
    assert found.tokens_per_step == 2.25 and found.draft_tokens == 16
    assert found.draft_share == pytest.approx(0.004 / 0.911)


def test_a_step_of_prompts_and_a_window_without_steps_say_nothing_of_speed():
    model = drafting(VirtualClock(now_s=10.0))
    assert model.window(60).drafts.speedup is model.window(60).drafts.acceptance is None
    model.on_step(step(num_decode_tokens=0))
    found = model.window(10).drafts
    assert found.tokens_per_step is found.speedup is None and found.draft_tokens == 0


def test_without_speculation_there_is_no_such_figure():
    model = telemetry(VirtualClock(now_s=10.0))
    model.on_step(step())
    assert all(window.drafts is None for window in take_snapshot(model).windows)


def test_timings_tell_drafts_in_llama_cpps_words_where_there_were_some():
    clock = VirtualClock()
    model = drafting(clock)
    plain = answer(model, clock, "a", [0.1, 0.1])
    assert "draft_n" not in plain.timings()
    timeline = begin(model, "b")
    timeline.num_drafts, timeline.num_kept_drafts = 8, 5
    timeline.add_tokens(0, 6)
    assert (timeline.timings()["draft_n"], timeline.timings()["draft_n_accepted"]) == (8, 5)
