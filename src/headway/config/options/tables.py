"""The options themselves: tables of rows, from which everything else is generated.

`EngineOptions` say what is served and with how much memory, `ServerOptions` where and to whom,
`SamplingOptions` how `run` and `chat` choose tokens. None marks "derived": see `config.resolve`.
"""

from dataclasses import dataclass

from headway.config.options.field import Bytes, Multiple, Seconds, Stages, option
from headway.spec.formats import FORMATS, FP8, GGUF, MARLIN, METHODS
from headway.spec.kv_format import APART, ROUNDED

FRACTIONS_AND_MULTIPLES = tuple(Multiple(factor) for factor in (1 / 8, 1 / 4, 1 / 2, 2, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the engine process needs to know."""

    dtype: str = option(
        "auto",
        "Type of weights and activations; auto is the checkpoint's own.",
        choices=("auto", "bfloat16", "float16", "float32"),
        common=True,
    )
    device: str = option("auto", "Where to compute.", choices=("auto", "cpu", "cuda"), common=True)
    load_format: str = option(
        "auto",
        "auto reads safetensors; dummy makes random weights from config.json alone.",
        choices=("auto", "safetensors", "dummy"),
    )
    tokenizer: str = option("", "Folder of the tokenizer, when it is not the model's.")
    skip_tokenizer_init: bool = option(
        False, "Serve token ids without a tokenizer: prompts are ids and so are answers."
    )
    chat_template: str = option("", "File with a chat template, instead of the model's own.")
    chat_control_tokens: bool = option(
        False,
        "Special tokens in the text of users' and tools' messages are the model's own, not text.",
    )
    max_model_len: int | None = option(
        None, "Longest context: prompt and answer.", low=1, unit="tokens", common=True
    )
    max_num_seqs: int | None = option(
        None,
        "Most sequences advanced in one step.",
        low=1,
        high=4096,
        common=True,
        tunable=FRACTIONS_AND_MULTIPLES,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of one step: decodes and prompt chunks.",
        low=1,
        unit="tokens",
        tunable=FRACTIONS_AND_MULTIPLES,
    )
    batching: str = option(
        "continuous",
        "Newcomers join at every step (continuous); or start as a batch, full or when the first "
        "has waited 50 ms (dynamic, dynamic:80ms); or full only (static).",
    )
    policy: str = option(
        "slo",
        "Who goes first: who can still meet its objectives, the user who had least, the smallest "
        "priority, or who came first.",
        choices=("slo", "fair", "priority", "fcfs"),
        common=True,
        tunable=("slo", "fair", "fcfs"),
    )
    late: str = option(
        "serve",
        "Policy slo: requests that can no longer meet their objectives come last, or are refused.",
        choices=("serve", "shed"),
        tunable=("serve", "shed"),
    )
    long_prefill: Seconds = option(
        Seconds(1.5),
        "Policy slo: a prompt that takes longer is long, and runs in a lane beside short ones.",
        low=0.001,
        unit="seconds",
        tunable=(0.25, 0.75, 1.5, 4.0),
    )
    lane_share: float = option(
        0.1,
        "Policy slo: share of the time for prompts that long ones get beside others.",
        low=0.01,
        high=0.99,
        tunable=(0.02, 0.1, 0.3),
    )
    aging: int = option(
        16_384,
        "Policy slo: prompt tokens that arrived later and may overtake a request before its "
        "order is fixed.",
        low=1,
        unit="tokens",
        tunable=(Multiple(1 / 8), Multiple(8)),
    )
    block_size: int | None = option(
        None,
        "Tokens in one KV block: 16, and 64 with int4 KV, if it is left out.",
        low=1,
        high=1024,
        unit="tokens",
        tunable=(8, 16, 32, 64),
    )
    kv_memory: Bytes | None = option(
        None, "Memory for the KV cache, as 4GiB or a share of the free memory as 40%.", common=True
    )
    kv_host_memory: Bytes = option(
        Bytes(0),
        "Host memory that preempted requests and what leaves the prefix cache are copied to where "
        "that is cheaper than to compute them again, as 8GiB or a share of what is free; 0 for "
        "none. On a CPU it is the memory of --kv-memory, which does more.",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the GPU's memory for weights and KV; on a CPU, of all its memory.",
        low=0.05,
        high=1.0,
    )
    kv_disk: str = option(
        "",
        "Keep KV blocks on a disk for later prompts, also after a restart: 20GB in the user's "
        "cache folder, FOLDER or FOLDER:20GB. It then holds what was asked and answered.",
    )
    kv_disk_write: str = option(
        "100MB",
        "Most bytes a second that are written there, of blocks used twice or dear to compute; "
        "through: every full block of a running request, without a limit.",
    )
    prefix_cache: bool = option(
        True, "Keep what was computed for the next prompt that begins with the same tokens."
    )
    prefix_cache_policy: str = option(
        "lfu",
        "What goes first: least recently used, least often, or cheapest to compute again.",
        choices=("lru", "lfu", "cost"),
        tunable=("lru", "lfu", "cost"),
    )
    attention_backend: str = option(
        "auto",
        "Attention: native (a CPU's, compiled at install), triton, varlen or flashinfer (a GPU's: "
        "our own, torch's, an extra), sdpa (torch's) or reference (slow).",
        choices=("auto", "native", "triton", "varlen", "flashinfer", "sdpa", "reference"),
    )
    kv_layers: str = option(
        "",
        "YAML file of layers that keep a window of the newest tokens and the first ones alone: "
        "less KV, and a lossy answer.",
    )
    kv_read: str = option(
        "",
        "Share of its context that a generated token reads, by blocks, the best: 25%. Layers with "
        "a window, and those that --kv-layers calls whole, read what they see. A lossy answer.",
    )
    kv_keep: str = option(
        "",
        "Share of a computed prompt's tokens that is kept for the answer: 25%, those whose keys "
        "are least like the others'. Layers with a window, and those that --kv-layers calls whole, "
        "keep what they see. A lossy answer.",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of keys and values in memory: the model's, or int8 or int4 (native attention), or "
        "keys/values apart; int4 keeps the newest block of each request as computed.",
        choices=("auto", *ROUNDED, *APART),
        tunable=("auto", "int8"),
    )
    kv_cache_dtype_skip_layers: str = option(
        "",
        "Layers whose keys and values stay in the model's type beside --kv-cache-dtype int8 or "
        "int4: 0,1,22-23.",
    )
    kernels: str = option(
        "auto",
        "On a CPU: native (compiled at install) or torch; on a GPU: cuda (our own, in Triton), "
        "cublas (the same, but 16-bit products are torch's: a row's bits may depend on how many "
        "stand beside it) or torch; auto is the first where it runs.",
        choices=("auto", "native", "cuda", "cublas", "torch"),
    )
    quantization: str = option(
        "none",
        "Round the weights of linear layers while loading; int4 keeps the head in int8, fp8 (on a "
        "GPU) in 16 bits. A folder that is quantized already stays so: int8 and int4 round what it "
        "holds in 16 bits, and a method must be the folder's own.",
        choices=tuple(dict.fromkeys((*FORMATS, *METHODS, GGUF, *MARLIN))),
        common=True,
        tunable=("none", "int8", "int4"),
    )
    quantization_group: int = option(
        0,
        "Inputs that share a scale in int4, one format for all layers: 32, 64 or 128. 0 measures "
        "the model at its first start, and chooses int4 or int8 for each matrix.",
        low=0,
        high=128,
    )
    quantization_head: str = option(
        "int8",
        "Format of the head beside int4 layers: int4 halves its bytes, and costs quality.",
        choices=("int8", "int4"),
    )
    fp8: str = option(
        "exact",
        "What a folder's FP8 weights become: exact, which multiplies them in bf16; int8, which "
        "rounds them once more, by output: faster beside several requests, and lossy; or on a GPU "
        "scaled, which rounds activations to FP8 by token, and multiplies FP8.",
        choices=FP8,
    )
    weight_cache: Bytes = option(
        Bytes(10_000_000_000),
        "Disk for rounded weights, kept for the next start; the least recently used go; 0 is off.",
        low=0,
    )
    speculative_method: str | None = option(
        None,
        "Proposers of draft tokens, which steps verify; answers stay the same: off, auto, or some "
        "of ngram, suffix, grammar, lookahead, draft, medusa, eagle, with commas. By default auto "
        "with --draft-model, else off.",
    )
    draft_model: str = option("", "Folder of a smaller model with the same tokenizer that drafts.")
    num_speculative_tokens: int = option(
        8, "Most draft tokens of a sequence in a step.", low=1, high=64
    )
    draft_vocab_size: int | None = option(
        None,
        "Tokens that a draft model, heads or a layer guess among, the frequent and the recent; 0: "
        "all. By default a third of the vocabulary, at most 32,768.",
        low=0,
    )
    threads: int | None = option(None, "CPU threads the model computes with.", low=1, high=1024)
    tensor_parallel_size: int = option(
        1,
        "Ranks, a process each, that compute every layer together; they share the threads.",
        low=1,
        high=64,
    )
    pipeline_parallel_size: Stages = option(
        Stages(1),
        "Ranks, a process each, that have some of the layers each, one behind the other. halves: "
        "attention on one, the MLPs of all layers on another.",
    )
    decode_context_parallel_size: int = option(
        1,
        "Ranks, a process each, that hold a part of each context's keys and values: splits of 512 "
        "tokens, in turn. Each computes whole layers, or --tensor-parallel-size of them together.",
        low=1,
        high=64,
    )
    sum_parts: int = option(
        0,
        "Parts of each sum that ranks share, a multiple of them: the same tokens from any number "
        "of ranks, seeded ones too. 0: a part for each rank.",
        low=0,
        high=64,
    )
    overlap: int | None = option(
        None,
        "Steps that are planned and submitted while another runs: 1 on a GPU where it is left out, "
        "one less than the stages of a pipeline; else a CPU takes one step at a time.",
        low=0,
        high=2,
    )
    graphs: bool = option(
        True, "On a GPU: replay decode steps as CUDA graphs, where the kernels allow it."
    )
    seed: int = option(0, "Seed of requests that bring none, and of dummy weights.", low=0)
    executor: str = option(
        "torch",
        "torch computes; null only waits 10 ms a step, to measure everything else.",
        choices=("torch", "null"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the server process needs to know."""

    host: str = option("127.0.0.1", "Address to listen on.", common=True)
    port: int = option(8000, "Port to listen on.", low=0, high=65535, common=True)
    ssl_certfile: str = option("", "Certificate and its chain (PEM): serve HTTPS.")
    ssl_keyfile: str = option("", "Private key (PEM) of --ssl-certfile.")
    uds: str = option("", "Unix socket to listen on, instead of --host and --port.")
    replicas: int = option(
        1,
        "Engines that serve the model behind this address; each takes its share of the cores.",
        low=1,
        high=64,
        common=True,
    )
    prefill_replicas: int = option(
        0,
        "Engines that compute prompts and hand the answers over; with --decode-replicas, in place "
        "of --replicas.",
        low=0,
        high=64,
    )
    decode_replicas: int = option(
        0, "Engines that go on with the answers of --prefill-replicas.", low=0, high=64
    )
    allow_unverified_kv: bool = option(
        False,
        "Start with --kv-layers, --kv-read or --kv-keep though no gate was passed: for research.",
    )
    served_model_name: list[str] = option(
        [], "Names clients use for the model; the first is echoed.", common=True
    )
    api_key: list[str] = option(
        [],
        "Keys that may ask; without one everybody on this address may.",
        common=True,
        secret=True,
    )
    key_file: str = option(
        "", "YAML file of keys as hashes, with names, classes and limits; SIGHUP reads it again."
    )
    share_prefix_cache: bool = option(
        False, "Let each key find what others have computed; who times answers can tell."
    )
    insecure: bool = option(False, "Listen beyond this machine although there is no API key.")
    allowed_origins: list[str] = option(
        [], "Web pages that may ask (CORS), such as http://localhost:3000 or *."
    )
    root_path: str = option(
        "", "Path below which a reverse proxy serves this server, such as /models."
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls; auto goes by its chat template, generic describes tools "
        "in the system message where the template knows none.",
        choices=(
            *("auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_list"),
            *("gemma4", "functiongemma", "granite", "generic"),
        ),
    )
    strict_api: bool = option(False, "Refuse unknown request fields instead of warning.")
    max_n: int = option(16, "Most sequences one request may ask for.", low=1, high=128)
    max_body: Bytes = option(Bytes(10_000_000), "Largest request body.", low=1)
    response_memory: Bytes = option(
        Bytes(64 * 1024**2),
        "Memory for stored responses, the least recently used go first; 0 stores none.",
        low=0,
    )
    data_dir: str = option(
        "",
        "Folder of uploaded files and batches; by default headway in the user's state folder.",
    )
    max_file: Bytes = option(Bytes(200_000_000), "Largest uploaded file.", low=1)
    file_quota: Bytes = option(
        Bytes(10_000_000_000), "Most bytes that the files of one key may take.", low=1
    )
    batch_concurrency: int | None = option(
        None,
        "Lines of batches that run at once while nobody else asks; else one.",
        low=1,
        high=4096,
    )
    batch_price: float | None = option(
        None, "Price of a token in the class batch, beside another's.", low=0, high=10
    )
    engine_timeout: Seconds = option(
        Seconds(3.0), "Silence after which the engine counts as dead.", low=0.5, unit="seconds"
    )
    step_timeout: Seconds = option(
        Seconds(120.0),
        "A step that computes nothing for so long hangs, and an engine that takes no message; so "
        "does a step that computes for longer, and ten times longer than any before: a new engine. "
        "On a GPU all of a step counts as computed, for its thread may sleep meanwhile.",
        low=0.5,
        unit="seconds",
    )
    drain_timeout: Seconds = option(
        Seconds(30.0), "On SIGTERM: how long running requests may take.", low=0, unit="seconds"
    )
    max_connections: int = option(
        4096, "Most connections at once; half of them from one address.", low=2, high=100_000
    )
    slo: list[str] = option(
        [],
        "Objectives as ttft=500ms,tpot=50ms; for a class interactive:ttft=500ms. Repeat for more.",
        separator="",
        common=True,
    )
    classes: str = option(
        "", "YAML file of service classes: objectives, weight, limits, price by name."
    )
    max_queue: int | None = option(
        None,
        "Most requests that wait for a first token; by default 4 for each that runs, at least 256.",
        low=1,
    )
    max_queue_wait: Seconds | None = option(
        None,
        "Longest predicted wait for a first token, of any request; by default 60 s for requests "
        "that ask for no objective, else from the objective.",
        low=0,
        unit="seconds",
    )
    fallback_model: str = option(
        "", "Who answers what would be refused: [NAME=]URL (OpenAI's dialect) or [NAME=]FOLDER."
    )
    fallback_late: bool = option(
        False, "The fallback also answers what would miss its objective for the first token."
    )
    slo_target: float = option(
        0.9, "Share of requests that are to meet their objectives.", low=0.01, high=1.0
    )
    price_per_hour: float | None = option(
        None, "What the machine costs, for cost per token.", low=0, unit="dollars"
    )
    cached_price: float = option(
        0.1, "What a cached token of a prompt costs, as a share of another's.", low=0, high=1
    )
    metrics_prefix: str = option(
        "headway", "Prefix of the metric names.", choices=("headway", "vllm")
    )
    otlp_endpoint: str = option(
        "", "OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """How the processes of a server log."""

    log_level: str = option(
        "info", "How much is logged.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "One line or one JSON object for each event.", choices=("text", "json")
    )
    log_requests: bool = option(True, "Log a line for each request at --log-level info.")
    log_stats: bool = option(True, "Log a line with the totals each minute while requests come.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How `run` and `chat` choose tokens; None takes the model's generation_config.json."""

    temperature: float | None = option(
        None, "0 takes the likeliest token.", low=0, high=2, common=True
    )
    top_p: float | None = option(None, "Keep the likeliest tokens up to this mass.", low=0, high=1)
    top_k: int | None = option(None, "Keep this many tokens; 0 keeps all.", low=-1)
    min_p: float | None = option(None, "Keep tokens this likely beside the best.", low=0, high=1)
    max_tokens: int | None = option(
        None,
        "Longest answer; the rest of the context by default.",
        low=1,
        unit="tokens",
        common=True,
    )
    seed: int | None = option(None, "Same seed, same answer.", low=0)
    stop: list[str] = option([], "Text at which the answer ends.", separator="")
