"""What a fix would give here: seconds, tokens and money, from the roofline or from what was seen.

Each function returns the fix in this server's numbers and the gain. A gain is a share of a mean
request's time or of the spend, so that fixes can be ranked; its assumption stands in the rule.
"""

from dataclasses import dataclass, replace

from headway.advise.reading import Reading
from headway.advise.roofline import DecodeStep, decode_step
from headway.advise.symptoms import (
    BFLOAT16,
    MAX_NUM_SEQS,
    MORE_ROWS,
    failing_share,
    narrower,
    queued,
    rounding,
)
from headway.advise.words import duration, percent, plural, tokens
from headway.core.alternatives import highest
from headway.core.memory_plan import gib
from headway.core.speculation_config import DRAFTERS

ACCEPTED = 0.6
DRAFTS = 3
USUAL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A fix in numbers; `share` of a mean request's time, or of the spend where `of_spend`.

    `what_if` is the same as a change that can be simulated (`advise.what_if`); "" where none is.
    """

    do: str
    expect: str
    share: float
    of_spend: bool = False
    what_if: str = ""


def queue_share(r: Reading) -> float:
    return r.share_of_request(r.queue_s)


def more_kv(r: Reading) -> Advice:
    """Blocks for those that wait too."""
    rows, waiting = max(r.steps.rows or r.load.running or 1.0, 1.0), r.load.waiting or 0.0
    factor = max((rows + waiting) / rows, 1.5)
    do = f"--kv-memory of {factor:.1f} times what it is"
    if r.kv.num_tokens and r.kv.bytes_per_token:
        now = r.kv.num_tokens * r.kv.bytes_per_token
        do = f"--kv-memory {gib(now * factor)} instead of {gib(now)}"
        for option, size in list(narrower(r.kv.choices, r.kv.bytes_per_token).items())[-1:]:
            do += f", or {option}: {r.kv.bytes_per_token / size:.1f} times the tokens"
    each = (r.lengths.prompt.mean or 0.0) + (r.lengths.output.mean or 0.0)
    if each:
        do += f", or requests below {tokens(each)} tokens: shorter prompts, a lower max_tokens"
    expect = f"the queue of {duration(r.queue_s)} goes"
    step = decode_step(r)
    if step is not None:
        more = rows * factor
        change = f"{duration(step.seconds)} to {duration(step.with_(rows=more))}"
        expect += f"; a decode step grows from {change}"
    return Advice(do=do, expect=expect, share=queue_share(r), what_if=f"kv_memory={factor:.2f}x")


def more_rows(r: Reading) -> Advice:
    """A higher --max-num-seqs."""
    limit = r.limits.max_num_seqs or 1
    wanted = limit + (r.load.waiting or 0.0)
    wanted = round(min(wanted, limit * MORE_ROWS, highest(MAX_NUM_SEQS)))
    expect = f"the queue of {duration(r.queue_s)} goes"
    step = decode_step(r)
    if step is not None:
        expect += (
            f"; a decode step grows from {duration(step.seconds)} to "
            f"{duration(step.with_(rows=wanted))}, tokens/s by {step.speedup(wanted):.1f}"
        )
    return Advice(
        do=f"{MAX_NUM_SEQS} {wanted}",
        expect=expect,
        share=queue_share(r),
        what_if=f"max_num_seqs={wanted}",
    )


def less_load(r: Reading) -> Advice:
    """As much as leaves, or another server."""
    do, what_if = "send less at once, or share the load with a second server", ""
    expect = f"the queue of {duration(r.queue_s)} goes"
    arriving, leaving = r.load.arrivals_per_s, r.load.finished_per_s
    if leaving:
        do = f"send at most {leaving:.1f} requests/s, or share them with a second server"
        if arriving and arriving > leaving:
            what_if = f"rate={leaving / arriving:.2f}x"
            expect += f"; {arriving / leaving:.1f} servers hold what arrives"
    share = queue_share(r) or r.share_of_request(r.latency.ttft.mean)
    return Advice(do=do, expect=expect, share=share, what_if=what_if)


def smaller_chunks(r: Reading) -> Advice:
    """Fewer prompt tokens a step; the others wait for shorter steps."""
    chunk = r.steps.prefill_tokens or r.limits.max_num_batched_tokens or 0.0
    least = max(round(chunk / 4 / 16) * 16, r.limits.max_num_seqs or 1)
    itl = r.latency.itl
    gap_s = r.steps.prefill_step_s or itl.p99 or 0.0
    plain_s = r.steps.decode_step_s or itl.p50 or 0.0
    do, what_if = "send long prompts to a server of their own, or cut them", ""
    expect = "the others no longer wait for them"
    if chunk > least:
        shorter_s = plain_s + (gap_s - plain_s) * least / chunk
        do = f"--max-num-batched-tokens {least}; or {do}"
        what_if = f"max_num_batched_tokens={least}"
        expect = f"the longest gaps fall from {duration(gap_s)} to {duration(shorter_s)}"
    longest, short = r.lengths.longest_prompt or 1.0, r.lengths.short_prompt or 1.0
    waits = max(r.steps.prefill_share, queue_share(r))
    if not waits and itl.p99:
        waits = 1 - (itl.p50 or 0.0) / itl.p99
    return Advice(do=do, expect=expect, share=waits * (1 - short / longest), what_if=what_if)


def shorter_prompts(r: Reading) -> Advice:
    """Half of the prompt."""
    half = (r.prefill_s or 0.0) / 2
    length = r.lengths.prompt.mean or 0.0
    if not half:
        share = percent(r.steps.prefill_share)
        return Advice(
            do="prompts half as long",
            expect=f"half of the prefill, which takes {share} of the time in steps",
            share=r.steps.prefill_share / 2,
            what_if="prompts=0.5x",
        )
    return Advice(
        do=f"prompts of {tokens(length / 2)} tokens instead of {tokens(length)}",
        expect=f"prefill from {duration(r.prefill_s)} to {duration(half)}",
        share=r.share_of_request(half),
        what_if="prompts=0.5x",
    )


def cached_prefix(r: Reading) -> Advice:
    """The shared part of the prompt is not computed again."""
    length, shared = r.lengths.prompt.mean or 1.0, r.prefix.shared_tokens or 0.0
    computing_s = r.prefill_s if r.prefill_s is not None else r.latency.ttft.mean
    saved_s = (computing_s or 0.0) * min(shared / length, 1.0)
    kept_s = (computing_s or 0.0) - saved_s
    return Advice(
        do=f"let prompts begin with the same {tokens(shared)} tokens, what differs behind them",
        expect=f"prefill from {duration(computing_s)} to {duration(kept_s)} where they are cached",
        share=r.share_of_request(saved_s),
        what_if=f"prefix={round(shared)}" if shared >= 1 else "",
    )


def batch_host_work(r: Reading) -> Advice:
    """The host's work is done once a step, for however many rows."""
    rows = max(r.steps.rows or 1.0, 1.0)
    most = max(min(rows * MORE_ROWS, r.limits.max_num_seqs or rows * MORE_ROWS), rows)
    if queued(r):
        most = rows  # what waits cannot run: the queue is another rule's
    roofline = r.steps.roofline if r.steps.roofline is not None else 1.0
    wasted = max(1 - roofline, r.steps.host_share or 0.0)
    times = 1 / (1 - wasted + wasted * rows / most)
    do = f"send {most:.0f} requests at a time instead of {rows:.0f}, or some with n above 1"
    if most < 1.5 * rows:
        do = (
            "a larger model would cost little more; more rows cannot run before the queue is mended"
        )
    return Advice(
        do=do,
        expect=f"tokens/s up to {times:.1f} times; one request alone does not get faster",
        share=1 - 1 / times,
        of_spend=True,
    )


def nearer_the_roofline(r: Reading) -> Advice:
    """Half of the ceilings, which kernels usually reach."""
    seconds, roofline = r.steps.main_step_s or 0.0, r.steps.roofline or 0.0
    after_s = seconds * roofline / USUAL
    return Advice(
        do=f"free the cores of other work{fewer_threads(r)}; compare headway doctor on the idle "
        "machine",
        expect=f"a step from {duration(seconds)} to about {duration(after_s)}",
        share=max(1 - roofline / USUAL, 0.0) * (1 - queue_share(r)),
    )


def fewer_threads(r: Reading) -> str:
    """The option by which the model leaves cores to others; a GPU computes with none of them."""
    return "" if r.machine.device == "cuda" else ", or lower --threads to those that are free"


def more_requests(r: Reading) -> Advice:
    """The weights are read once for eight times the rows."""
    step = needed(r)
    limit = r.limits.max_num_seqs or step.rows * MORE_ROWS
    rows = round(min(step.rows * MORE_ROWS, limit))
    speedup = step.speedup(rows)
    expect = (
        f"a step from {duration(step.seconds)} to {duration(step.with_(rows=rows))}, "
        f"tokens/s from {step.rows / step.seconds:.0f} to {rows / step.with_(rows=rows):.0f}"
    )
    if r.spend.price_per_hour:
        expect += f", the price of a token divided by {speedup:.1f}"
    do = f"{rows} requests at a time instead of {step.rows:.1f}: send them without waiting"
    return Advice(do=do, expect=expect, share=1 - 1 / speedup, of_spend=True)


def needed(r: Reading) -> DecodeStep:
    """The decode step of a reading whose symptom knows it."""
    step = decode_step(r)
    assert step is not None, "the symptom holds without a decode step"
    return step


def faster_decode(r: Reading, step: DecodeStep, after_s: float, do: str) -> Advice:
    """A decode step of `after_s`."""
    share = 1 - after_s / step.seconds
    return Advice(
        do=do,
        expect=(
            f"a decode step from {duration(step.seconds)} to {duration(after_s)} at "
            f"{step.rows:.1f} rows, as the KV stays"
        ),
        share=r.decode_share * share,
        what_if=do.removeprefix("--").replace("-", "_").replace(" ", "="),
    )


def half_weights(r: Reading) -> Advice:
    step = needed(r)
    share = r.weights.choices[BFLOAT16] / step.weight_bytes
    advice = faster_decode(r, step, step.with_(weights=share), BFLOAT16)
    return replace(advice, what_if="")


def rounded_weights(r: Reading) -> Advice:
    """The narrowest that this server can be started with; a wider one is named with its step."""
    step = needed(r)
    after = {
        option: step.with_(weights=size / step.weight_bytes) for option, size in rounding(r).items()
    }
    *wider, (option, after_s) = after.items()
    advice = faster_decode(r, step, after_s, option)
    for other, seconds in wider:
        advice = replace(advice, expect=f"{advice.expect} ({other}: {duration(seconds)})")
    return advice


def narrower_kv(r: Reading) -> Advice:
    """The narrowest KV that this server can be started with."""
    step, now = needed(r), r.kv.bytes_per_token or 1.0
    *_, (option, size) = narrower(r.kv.choices, now).items()
    advice = faster_decode(r, step, step.with_(kv=size / now), option)
    return replace(advice, expect=advice.expect.replace(", as the KV stays", ""))


def cores_for_ourselves(r: Reading) -> Advice:
    """What others took of the cores comes to the model."""
    cores, seconds = r.machine.cores, r.steps.main_step_s
    share = min(cores.others_share + cores.steal_share, 0.99) if cores else 0.0
    expect = f"{percent(share)} of the cores' time for the model"
    if seconds:
        expect = f"a step from {duration(seconds)} to about {duration(seconds * (1 - share))}"
    return Advice(
        do=f"end or move what else uses the cores{fewer_threads(r)}; for a virtual machine, cores "
        "of its own",
        expect=expect,
        share=share,
    )


def drafts(r: Reading) -> Advice:
    step = needed(r)
    per_step = sum(ACCEPTED**i for i in range(DRAFTS + 1))
    after_s = step.with_(rows=step.rows * (DRAFTS + 1)) / per_step
    return Advice(
        do="--speculate auto, with --draft-model where there is a smaller model of the same "
        "tokenizer",
        expect=f"{duration(step.seconds)} a token to {duration(after_s)}, with the same tokens; "
        "the doctor tells what it brings once it runs",
        share=r.decode_share * max(1 - after_s / step.seconds, 0.0),
    )


def other_drafts(r: Reading) -> Advice:
    """Without guesses that bring nothing, or with others."""
    speedup = r.drafts.speedup or 0.0
    lost = max(1 - speedup, 0.0)
    do = "--speculate off"
    if not set(DRAFTERS) & set(r.drafts.sources):
        do += ", or --draft-model with a smaller model of the same tokenizer"
    return Advice(
        do=do,
        expect=f"{percent(lost)} of the time of decoding comes back"
        if lost
        else "little: guesses that are not worth their price are not verified",
        share=r.decode_share * lost,
    )


def read_faster(r: Reading) -> Advice:
    """The client's own time."""
    held_s = max(stream.seconds for stream in r.client.slow_streams)
    age_s = max(stream.age_s for stream in r.client.slow_streams)
    return Advice(
        do="read each stream in a task of its own and work on the text elsewhere; or stream=false",
        expect=f"these requests end {duration(held_s)} sooner or more; the server can do nothing",
        share=min(held_s / max(age_s, 1e-9), 1.0),
    )


def lighter_client(r: Reading) -> Advice:
    return Advice(
        do="run the load generator on another machine, or at a lower --rate",
        expect="figures of the server instead of the client's",
        share=1.0,
    )


def valid_bodies(r: Reading) -> Advice:
    share = failing_share(r, r.faults.validation_failures)
    top = max(r.faults.errors, key=r.faults.errors.__getitem__, default="")
    return Advice(
        do=f"mend the requests (most often {top}): the error names the field" if top
        else "mend the requests: the error names the field",
        expect=f"{percent(share)} of requests count that are lost now; cost per success /"
        f" {1 / max(1 - share, 0.01):.1f}",
        share=share,
    )  # fmt: skip


def fewer_refusals(r: Reading) -> Advice:
    share = failing_share(r, r.faults.refused)
    return Advice(
        do="send again after the Retry-After that the refusal names, with growing pauses",
        expect=f"{percent(share)} of requests are served later instead of never",
        share=share,
    )


def fewer_failures(r: Reading) -> Advice:
    share = failing_share(r, r.faults.num_failed)
    return Advice(
        do="read the server's log at the times of the failures; raise client time-outs",
        expect=f"{percent(share)} of requests, and what they cost, are not lost",
        share=share,
    )


def patient_clients(r: Reading) -> Advice:
    share = r.faults.num_retries / max(r.load.num_ended + r.faults.num_retries, 1)
    after = duration(r.latency.e2e.p99)
    return Advice(
        do=f"a client time-out above the p99 of a request, {after}; max_retries=0 or 1",
        expect=f"{percent(share)} of the work is not done twice",
        share=share,
        of_spend=True,
    )


def no_restarts(r: Reading) -> Advice:
    return Advice(
        do="read the server's log: no memory (--kv-memory), a silent engine (--engine-timeout)",
        expect=f"{plural(r.faults.num_restarts, 'restart')} and all that ran then are not lost",
        share=1.0,
    )


def fill_up(r: Reading) -> Advice:
    idle = r.steps.idle_share or 0.0
    expect = f"{percent(idle)} of the time is paid for and not used"
    price = r.spend.price_per_hour
    if price:
        expect += f": ${price * idle:.2f} of ${price:.2f} an hour"
    return Advice(
        do="serve more from it, or the same from a smaller machine or fewer replicas",
        expect=expect,
        share=idle,
        of_spend=True,
    )
