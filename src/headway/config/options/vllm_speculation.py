"""vLLM's options of speculative decoding in our words: one JSON object, or three short ones.

    {"method": "ngram", "num_speculative_tokens": 5}     --speculate lookup --max-drafts 5
    {"method": "suffix"}                                 --speculate lookup,suffixes
    {"model": "small", "num_speculative_tokens": 3}      --speculate draft --draft-model small …

vLLM verifies so many tokens in every step; here they are the most, and fewer are verified where
more would not pay. Methods and keys that mean nothing here are refused by name.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.errors import UsageError

METHODS = {
    "ngram": "lookup",
    "suffix": "lookup,suffixes",
    "draft_model": "draft",
    "medusa": "medusa",
    "eagle": "eagle",
}
"""vLLM's method → who guesses here; its suffix decoding looks into the prompt as well."""
SHORT = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""vLLM's short options → their key of the object."""
ALONE = {"draft_tensor_parallel_size": 1}
"""Keys that have one value here."""
CONFIG = "speculative_config"


def speculation(given: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, str]:
    """Our options for what `given` says in vLLM's; `spell` writes a name as its user did.

    >>> speculation({"spec_method": "ngram", "spec_tokens": 4}, str)
    {'speculate': 'lookup', 'max_drafts': '4'}
    """
    config = {}
    if CONFIG in given:
        config = parsed(given[CONFIG], spell(CONFIG))
    for name, key in SHORT.items():
        if name in given and key in config:
            raise UsageError(
                f"{spell(name)} and {key} in {spell(CONFIG)} are both given.", "Keep one of them."
            )
        if name in given:
            config[key] = given[name]
    return ours(config, spell(CONFIG))


def parsed(value: Any, name: str) -> dict[str, Any]:
    """The object that a flag writes as JSON, and YAML as itself; without what is null."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise UsageError(
            f"{name} is no JSON object.", 'Write {"method": "ngram", "num_speculative_tokens": 5}.'
        )
    return {key: each for key, each in found.items() if each is not None}


def ours(config: dict[str, Any], name: str) -> dict[str, str]:
    """Our options for vLLM's object."""
    config = {k: v for k, v in config.items() if not (k in ALONE and v == ALONE[k])}
    method, model = config.pop("method", None), config.pop("model", None)
    count = config.pop("num_speculative_tokens", None)
    if config:
        raise UsageError(
            f"{name}: {next(iter(config))} means nothing here.",
            "Leave it out: how much is guessed is decided in each step, up to --max-drafts.",
        )
    if method is None:
        method, model = (model, None) if model in METHODS else ("draft_model", model)
    if method not in METHODS:
        raise UsageError(
            f"{name}: there is no method {method} here.",
            f"Use one of {', '.join(METHODS)}, or --speculate.",
        )
    if (model is None) == (method == "draft_model"):
        raise UsageError(
            f"{name}: method {method} "
            + ("takes no model." if model is not None else "needs a model."),
            "Give model, the folder of a smaller model, with draft_model alone; what medusa and "
            "eagle read lies beside the model that is served.",
        )
    found = {"speculate": METHODS[method]}
    if model is not None:
        found["draft_model"] = str(model)
    if count is not None:
        found["max_drafts"] = str(count)
    return found
