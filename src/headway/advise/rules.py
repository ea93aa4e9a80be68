"""The rules of the doctor: symptom, cause, fix. A new insight is a new row.

Rows are pure: a predicate over a reading, the figures that show the symptom, the upper bound of the
fix, and the change that the simulator can try. `docs/doctor.md` is written from them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headway.advise import remedies, symptoms
from headway.advise.reading import ServerReading
from headway.config.alternatives import has_option

MISSING = "not in this version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. `holds` reads the parts of the reading that `reads` names.

    `share` is a part of a mean request's time, or of the spend, as `of` says: an upper bound.
    `option` names the option that the fix needs; whether this server can be started with it is
    decided by `holds`, from the choices of the reading. A `first` rule comes before all others, a
    `last` one is named only when no other holds.
    """

    name: str
    kind: str
    reads: tuple[str, ...]
    symptom: str
    cause: str
    fix: str
    holds: Callable[[ServerReading], bool]
    see: Callable[[ServerReading], list[str]]
    share: Callable[[ServerReading], float]
    change: Callable[[ServerReading], str] | None = None
    of: str = "time"
    option: str = ""
    first: bool = False
    last: bool = False

    @property
    def available(self) -> bool:
        """Return whether this version of Headway has the fix."""
        return not self.option or has_option(self.option)

    @property
    def remedy(self) -> str:
        """Return the fix; of a missing one: "Drafts: not in this version; shorter answers"."""
        if self.available:
            return self.fix
        what, semicolon, instead = self.fix.partition(";")
        return f"{what}: {MISSING}{semicolon}{instead}"


RULES = (
    Rule(
        name="contention",
        kind="contention",
        reads=("verdict",),
        symptom="Others use the cores that the model needs.",
        cause="Other processes run on them, or the hypervisor gives them to other machines.",
        fix="Free cores; on a CPU `--threads` for those that are; a machine of its own",
        holds=symptoms.contended,
        see=symptoms.see_contention,
        share=remedies.contention_share,
        first=True,
    ),
    Rule(
        name="engine-restarts",
        kind="fault",
        reads=("faults",),
        symptom="The engine was started again.",
        cause="It died or did not answer, and all running requests were lost.",
        fix="The server's log; `--kv-memory`, `--engine-timeout`",
        holds=symptoms.restarted,
        see=symptoms.see_faults,
        share=remedies.everything,
    ),
    Rule(
        name="client-bottleneck",
        kind="client",
        reads=("client",),
        symptom="The load generator sent late, read late or had no CPU left.",
        cause="It shares the machine with the server, or its load is too high for it.",
        fix="Another machine, a lower `--rate`",
        holds=symptoms.client_bound,
        see=symptoms.see_client,
        share=remedies.everything,
    ),
    Rule(
        name="failures",
        kind="requests",
        reads=("load", "faults"),
        symptom="Requests end with an error.",
        cause="Faults of the server, or time-outs.",
        fix="The server's log; client time-outs",
        holds=symptoms.failing,
        see=symptoms.see_faults,
        share=remedies.failed_share,
    ),
    Rule(
        name="slow-client",
        kind="client",
        reads=("client",),
        symptom="Generated tokens are not sent: the engine has done its part.",
        cause="A client reads its stream more slowly than tokens come, or the way to it is narrow.",
        fix="Read in a task of its own; `stream=false`; fewer `logprobs`",
        holds=symptoms.slow_client,
        see=symptoms.see_slow,
        share=remedies.slow_client_share,
    ),
    Rule(
        name="long-prefill",
        kind="compute",
        reads=("load", "latency", "lengths", "steps"),
        symptom="The time to the first token is the prompt's computing.",
        cause="Prompts are long for this machine's FLOP/s.",
        fix="Shorter prompts: fewer examples, less retrieved text",
        holds=symptoms.long_prefill,
        see=symptoms.see_prefill,
        share=remedies.prefill_share,
        change=remedies.shorter_prompts,
    ),
    Rule(
        name="validation",
        kind="requests",
        reads=("load", "faults"),
        symptom="Many bodies or answers do not validate.",
        cause="Fields that the server does not accept, prompts beyond the context, answers that "
        "break a schema.",
        fix="Correct the body; request a `response_format` with a schema and enough `max_tokens`",
        holds=symptoms.invalid,
        see=symptoms.see_faults,
        share=remedies.invalid_share,
    ),
    Rule(
        name="cold-cache",
        kind="cache",
        reads=("lengths", "prefix"),
        symptom="Prompts begin alike and are computed from their first token all the same.",
        cause="The cache does not find them: it is off, something early in the prompt differs, the "
        "blocks were needed for others, or each has another key or salt.",
        fix="`--prefix-cache true`; a stable prefix, with dates, ids and names last; more "
        "`--kv-memory`; `--share-prefix-cache` where keys may share",
        holds=symptoms.cold_cache,
        see=symptoms.see_cache,
        share=remedies.shared_prefix_share,
        change=remedies.stable_prefix,
    ),
    Rule(
        name="small-batch",
        kind="bandwidth",
        reads=("load", "latency", "steps", "limits", "machine", "weights"),
        symptom="Decode reads all weights for few rows.",
        cause="Clients send one request after another.",
        fix="More requests at a time",
        holds=symptoms.small_batch,
        see=symptoms.see_decode,
        share=remedies.few_rows_share,
        of="spend",
    ),
    Rule(
        name="rows",
        kind="capacity",
        reads=("load", "latency", "lengths", "steps", "limits", "machine", "weights", "kv"),
        symptom="Sequences wait while every row of a step is in use and the roofline has room.",
        cause="`max_num_seqs` is lower than the machine can serve.",
        fix="`--max-num-seqs`",
        holds=symptoms.rows_full,
        see=symptoms.see_rows,
        share=remedies.queue_share,
        change=remedies.more_rows,
    ),
    Rule(
        name="kv-capacity",
        kind="capacity",
        reads=("load", "latency", "lengths", "steps", "limits", "kv"),
        symptom="Sequences wait or are sent back while KV blocks are full.",
        cause="The KV pool is too small for the contexts that come.",
        fix="`--kv-memory` (on a GPU `--gpu-memory-utilization`), `--kv-cache-dtype int8`, "
        "`--kv-layers` with windows, shorter prompts, lower `max_tokens`",
        holds=symptoms.kv_full,
        see=symptoms.see_kv,
        share=remedies.queue_share,
        change=remedies.more_kv,
    ),
    Rule(
        name="host-bound",
        kind="host",
        reads=("steps",),
        symptom="Steps take many times what the ceilings allow, or there are gaps between them.",
        cause="Model or batch are so small that launching and book-keeping dominate.",
        fix="More requests at a time, `n`, `--threads 1` for small models; on a GPU `--graphs` and "
        "`--overlap 1`, its defaults",
        holds=symptoms.host_bound,
        see=symptoms.see_host,
        share=remedies.host_share,
        of="spend",
    ),
    Rule(
        name="wide-weights",
        kind="bandwidth",
        reads=("load", "latency", "lengths", "steps", "machine", "weights"),
        symptom="Decode reads weights of four bytes.",
        cause="`--dtype float32`, or a checkpoint in fp32.",
        fix="`--dtype bfloat16` (on a CPU without bf16 GEMMs it helps one or two rows)",
        holds=symptoms.wide_weights,
        see=symptoms.see_weights,
        share=remedies.two_byte_share,
    ),
    Rule(
        name="weight-bytes",
        kind="bandwidth",
        reads=("load", "latency", "lengths", "steps", "machine", "weights"),
        symptom="Decode is the reading of weights.",
        cause="Each step reads every weight once, at the memory's speed.",
        fix="`--quantization int4` or `int8` (`headway eval` says what that costs in quality), a "
        "smaller model, shorter answers",
        holds=symptoms.narrowable_weights,
        see=symptoms.see_weights,
        share=remedies.rounding_share,
        change=remedies.rounded_weights,
    ),
    Rule(
        name="kv-bytes",
        kind="bandwidth",
        reads=("load", "latency", "lengths", "steps", "machine", "weights", "kv"),
        symptom="Decode is the reading of KV.",
        cause="Many long contexts in each step.",
        fix="`--kv-cache-dtype int8`, `--kv-layers` with windows, shorter contexts",
        holds=symptoms.narrowable_kv,
        see=symptoms.see_kv_bytes,
        share=remedies.kv_bytes_share,
        change=remedies.narrower_kv,
    ),
    Rule(
        name="over-saturated",
        kind="load",
        reads=("load", "latency", "lengths", "steps", "limits", "machine", "weights", "kv"),
        symptom="Requests arrive faster than they end, and the queue is most of the TTFT.",
        cause="More load than this machine serves; no setting makes up for it.",
        fix="A lower rate, a second server; `--max-queue-wait` refuses early what would be late",
        holds=symptoms.over_saturated,
        see=symptoms.see_queue,
        share=remedies.load_share,
        change=remedies.lower_rate,
    ),
    Rule(
        name="queueing",
        kind="load",
        reads=("load", "latency", "lengths", "steps", "limits", "machine", "weights", "kv"),
        symptom="Requests wait for each other, and meet their objectives all the same.",
        cause="More requests come at once than are served at once; the queue is most of the TTFT.",
        fix="Nothing while objectives are met; a second server for shorter waits",
        holds=symptoms.queueing,
        see=symptoms.see_queue,
        share=remedies.load_share,
        change=remedies.lower_rate,
    ),
    Rule(
        name="hogging",
        kind="compute",
        reads=("lengths", "steps"),
        symptom="A few long prompts delay the tokens or first tokens of all other requests.",
        cause="Their chunks fill the token budget of each step.",
        fix="`--policy slo`, `--max-num-batched-tokens`, a server for long prompts",
        holds=symptoms.hogging,
        see=symptoms.see_hog,
        share=remedies.long_prompt_share,
        change=remedies.smaller_chunks,
    ),
    Rule(
        name="refusals",
        kind="requests",
        reads=("load", "faults"),
        symptom="Requests are refused for load or state.",
        cause="The model is loading, the server drains, or admission is full.",
        fix="Retry with growing pauses",
        holds=symptoms.turned_away,
        see=symptoms.see_faults,
        share=remedies.refused_share,
    ),
    Rule(
        name="drafts",
        kind="bandwidth",
        reads=("load", "latency", "lengths", "steps", "machine", "weights", "drafts"),
        symptom="Decode leaves arithmetic unused at few rows.",
        cause="One token a step and sequence.",
        fix="`--speculative-method auto`, `--draft-model`; shorter answers",
        holds=symptoms.drafts_pay,
        see=symptoms.see_decode,
        share=remedies.draft_share,
        option="--speculative-method",
    ),
    Rule(
        name="drafts-in-vain",
        kind="bandwidth",
        reads=("steps", "drafts"),
        symptom="Speculation is on and brings nothing.",
        cause="Few draft tokens are accepted: answers repeat nothing, or the draft model agrees "
        "too seldom for its cost.",
        fix="`--speculative-method off`, or a draft model that agrees more (`headway eval` "
        "compares two)",
        holds=symptoms.drafts_in_vain,
        see=symptoms.see_drafts,
        share=remedies.vain_draft_share,
        option="--speculative-method",
    ),
    Rule(
        name="slow-forward",
        kind="host",
        reads=("steps", "verdict"),
        symptom="The model itself takes many times what the ceilings allow.",
        cause="More threads than cores, others on the memory, or a type that this machine "
        "multiplies slowly.",
        fix="Free cores, `--threads`; `headway doctor FOLDER` shows the peak by type",
        holds=symptoms.slow_forward,
        see=symptoms.see_host,
        share=remedies.slow_forward_share,
    ),
    Rule(
        name="retries",
        kind="requests",
        reads=("load", "faults"),
        symptom="Clients send requests again.",
        cause="Their time-out is shorter than an answer takes.",
        fix="A longer client time-out, `max_retries=0`",
        holds=symptoms.retried,
        see=symptoms.see_faults,
        share=remedies.retry_share,
        of="spend",
    ),
    Rule(
        name="under-loaded",
        kind="under-loaded",
        reads=("load", "client", "steps"),
        symptom="Most of the time there is nothing to do.",
        cause="Fewer requests than the machine serves.",
        fix="More load, a smaller machine, fewer replicas",
        holds=symptoms.under_loaded,
        see=symptoms.see_idle,
        share=remedies.idle_share,
        of="spend",
        last=True,
    ),
)
"""In the order in which they are worth checking: causes that disturb all figures, then fixes that
cost nothing (shorter prompts, valid bodies, a working cache, fuller batches), then those that cost
quality (narrower weights and KV), machines (load on another server), or work per token (draft
tokens). Huyen, *AI Engineering*, 2025, ch. 9; NVIDIA's and Databricks' guides to inference agree.
"""
