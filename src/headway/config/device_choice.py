"""How a device takes its steps: ahead of the host, and as graphs."""

from headway.config.attention_choice import CAPTURED
from headway.config.options import EngineOptions
from headway.core.errors import UsageError
from headway.spec import ModelSpec


def choose_overlap(
    options: EngineOptions, device: str, model: ModelSpec, threads: int = 1
) -> tuple[int, str]:
    """How many steps are submitted beside the one that runs."""
    if model.states is not None and device != "cpu":
        if options.overlap:
            raise UsageError(
                f"--overlap {options.overlap}: {model.architecture} keeps a state, which a step "
                "ahead would have moved on.",
                "Leave it out.",
            )
        return 0, "a step ahead would move the state of a sequence on"
    stages = int(options.pipeline_parallel_size)
    if stages > 1 and device == "cpu":
        if options.overlap is not None:
            return options.overlap, "given"
        if not are_at_once(options, threads):
            return 0, "stages take turns: their ranks are more than there are threads"
        return stages - 1, "each stage of the pipeline has a step"
    if device == "cpu" or options.executor == "null":
        if options.overlap:
            who = "the null executor" if options.executor == "null" else "a CPU"
            raise UsageError(
                f"--overlap {options.overlap}: {who} takes one step at a time.",
                "Leave it out, or use a GPU, or the stages of a pipeline.",
            )
        return 0, "it is computed where it is planned: one step at a time"
    if options.overlap is not None:
        return options.overlap, "given"
    return 1, "the next step is planned while the device computes"


def are_at_once(options: EngineOptions, threads: int) -> bool:
    """Whether the stages of a pipeline compute at once, a step each: where `--overlap` is left out
    and stages have several ranks, those need a thread each."""
    stages = int(options.pipeline_parallel_size)
    size = options.tensor_parallel_size * options.decode_context_parallel_size
    if stages < 2 or options.overlap is not None:
        return stages > 1 and options.overlap != 0
    return size == 1 or stages * size <= threads


def choose_graphs(
    options: EngineOptions, device: str, backend: str, model: ModelSpec, at_once: bool
) -> tuple[bool, str]:
    """Whether decode steps are replayed: all that they queue must be decided beforehand.

    `at_once`: the experts of a layer are one product, see `quantization_choice.experts_at_once`.
    """
    if device == "cpu":
        return False, "they are a GPU's"
    if not options.graphs:
        return False, "given"
    if backend not in CAPTURED:
        return False, f"{backend} attention chooses sizes on the host in each step"
    if model.states is not None:
        return False, "states are kept on the host"
    if not at_once:
        return False, "experts in this format are multiplied one by one, as the host says"
    if model.length_rope is not None:
        return False, "the frequencies of its rope follow from each request's lengths"
    return True, "a decode step is one launch"


def yes_no(value: bool) -> str:
    """As a word."""
    return "yes" if value else "no"
