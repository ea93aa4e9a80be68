"""Conversion of a LiteLLM proxy's config.yaml: the common part, and a list of what has no place.

    model_list        an upstream each, and a model row for each model_name
    router_settings   routing_strategy, num_retries, timeout, fallbacks, model_group_alias
    litellm_settings  num_retries, request_timeout, fallbacks, cache in memory

A key that stands in the file is not copied: its upstream names an environment variable.
"""

import re
from dataclasses import dataclass, field
from typing import Any

Rows = dict[str, Any]
PROVIDER_URLS = {
    "groq": "https://api.groq.com/openai/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "mistral": "https://api.mistral.ai/v1",
    "together_ai": "https://api.together.xyz/v1",
    "openrouter": "https://openrouter.ai/api/v1",
    "xai": "https://api.x.ai/v1",
}
"""Prefix of a model → the OpenAI-compatible base of its provider."""
OWN_SERVERS = ("hosted_vllm", "vllm", "openai", "text-completion-openai", "ollama", "ollama_chat")
"""Prefixes of servers that speak OpenAI's API at `api_base`."""
KINDS = {"hosted_vllm": "vllm", "vllm": "vllm"}
GUESSES = (("gpt-", "openai"), ("o1", "openai"), ("o3", "openai"), ("o4", "openai"))
PREFIXES = (*GUESSES, ("claude-", "anthropic"))
"""Beginnings of a model without a provider → its provider."""
STRATEGIES = {"simple-shuffle": "weighted", "least-busy": "least"}
STRATEGIES |= {"latency-based-routing": "time"}
COSTS = {
    "input": "input_cost_per_token",
    "cached": "cache_read_input_token_cost",
    "output": "output_cost_per_token",
}
ENVIRONMENT = "os.environ/"
DONE = {
    *("model", "api_base", "base_url", "api_key", "api_version", "weight", "custom_llm_provider"),
    *("max_parallel_requests", *COSTS.values()),
}
"""Fields of `litellm_params` that have a place."""
CACHE_S = 60
"""Seconds of a cache without a ttl, as LiteLLM has it in memory."""


@dataclass(slots=True)
class Conversion:
    """Rows of the gateway's file, and the lines of what was not converted."""

    upstreams: list[Rows] = field(default_factory=list)
    models: dict[str, Rows] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def content(self) -> Rows:
        """Return the content of the gateway's file."""
        return {"upstreams": self.upstreams, "models": list(self.models.values())}

    def miss(self, where: str, why: str) -> None:
        """Note something that has no place, or that somebody must do."""
        self.missing.append(f"{where}: {why}")


def convert(content: Any) -> Conversion:
    """Convert the content of a config.yaml; what cannot be converted is in `missing`."""
    done = Conversion()
    content = content if isinstance(content, dict) else {}
    entries = content.get("model_list")
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        add_entry(done, entry, f"model_list[{number}]")
    router, settings = (dict_at(content, name) for name in ("router_settings", "litellm_settings"))
    for where, part in (("router_settings", router), ("litellm_settings", settings)):
        for name, value in part.items():
            convert_setting(done, where, name, value, part)
    for name in content:
        if name == "general_settings":
            for inner in dict_at(content, name):
                done.miss(f"{name}.{inner}", ADVICE.get(inner, "no such setting here"))
        elif name not in ("model_list", "router_settings", "litellm_settings"):
            done.miss(name, "no such part here")
    break_loops(done)
    return done


ADVICE = {
    "master_key": "give an operator's key as --api-key, or by `headway key NAME --admin`",
    "database_url": "not needed: the ledger is in --data-dir",
}


def dict_at(content: Rows, name: str) -> Rows:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


# ── models ──────────────────────────────────────────────────────────────────────────────────


def add_entry(done: Conversion, entry: Any, where: str) -> None:
    """Add an upstream, and its model row, of one entry of `model_list`."""
    entry = entry if isinstance(entry, dict) else {}
    params, info = dict_at(entry, "litellm_params"), dict_at(entry, "model_info")
    group, model = str(entry.get("model_name", "")), str(params.get("model", ""))
    if not group or not model or "*" in group + model:
        done.miss(where, f"{model or group!r} is no single model; write a row for each")
        return
    row = place_of(done, params, model, where)
    if row is None:
        return
    row["name"] = unique_name(done, group)
    add_key(done, row, params, where)
    price = price_of(params | info)
    row |= {"price": price} if price else {}
    if params.get("weight") is not None:
        row["weight"] = params["weight"]
    if params.get("max_parallel_requests") is not None:
        row["max_at_once"] = params["max_parallel_requests"]
    for name in params.keys() - DONE:
        done.miss(f"{where}.litellm_params.{name}", "no such field of an upstream")
    done.upstreams.append({"name": row.pop("name"), **row})
    model_row = done.models.setdefault(group, {"name": group, "upstreams": []})
    model_row["upstreams"].append(done.upstreams[-1]["name"])


def place_of(done: Conversion, params: Rows, model: str, where: str) -> Rows | None:
    """Return kind, URL and model of an upstream; None, with a line, for an unknown provider."""
    provider, slash, name = model.partition("/")
    if params.get("custom_llm_provider"):
        provider, name = str(params["custom_llm_provider"]), model.removeprefix(f"{provider}/")
    elif not slash:
        name = model
        provider = next((p for start, p in PREFIXES if model.startswith(start)), "")
    base = str(params.get("api_base") or params.get("base_url") or "")
    if base.startswith(ENVIRONMENT):
        done.miss(f"{where}.litellm_params.api_base", "write the URL that the variable has")
        return None
    if provider == "azure":
        version = str(params.get("api_version", "2024-10-21"))
        return {"kind": "azure", "url": base, "api_version": version, "model": name}
    if provider == "anthropic" or (provider == "openai" and not base):
        return {"kind": provider, "model": name} | ({"url": base} if base else {})
    if provider in OWN_SERVERS and base:
        url = base.rstrip("/") + ("/v1" if provider.startswith("ollama") else "")
        kind = {"kind": KINDS[provider]} if provider in KINDS else {}
        return {"url": url, "model": name, **kind}
    if provider in PROVIDER_URLS:
        can = ["tools", "schemas", "images"]
        url = base or PROVIDER_URLS[provider]
        return {"kind": "openai", "url": url, "model": name, "can": can}
    done.miss(f"{where}.litellm_params.model", f"the provider of {model!r} is not known here")
    return None


def add_key(done: Conversion, row: Rows, params: Rows, where: str) -> None:
    """Let the upstream's key come from the environment."""
    given = params.get("api_key")
    if isinstance(given, str) and given.startswith(ENVIRONMENT):
        row["key_env"] = given.removeprefix(ENVIRONMENT)
    elif given:
        row["key_env"] = re.sub(r"\W", "_", row["name"]).upper() + "_KEY"
        done.miss(f"{where}.litellm_params.api_key", f"not copied: export it as {row['key_env']}")
    elif "url" not in row or row.get("kind") in ("azure", "openai", "anthropic"):
        start = str(params.get("custom_llm_provider") or params["model"].partition("/")[0])
        name = start if start in PROVIDER_URLS else row["kind"]
        row["key_env"] = f"{name.upper()}_API_KEY"


def price_of(fields: Rows) -> Rows:
    """Return a price per 1M tokens of costs per token."""
    price: Rows = {
        name: round(float(fields[cost]) * 1e6, 6)
        for name, cost in COSTS.items()
        if isinstance(fields.get(cost), int | float)
    }
    return {**price, "per": "1M"} if price else {}


def unique_name(done: Conversion, group: str) -> str:
    """Return a name of an upstream that no other has."""
    number = sum(1 for row in done.upstreams if row["name"].rpartition("-")[0] == group)
    return f"{group}-{number + 1}"


# ── settings ────────────────────────────────────────────────────────────────────────────────


def convert_setting(done: Conversion, where: str, name: str, value: Any, part: Rows) -> None:
    """Convert one setting of the router or of LiteLLM."""
    rows = done.models.values()
    if name == "num_retries" and isinstance(value, int):
        set_all(done, "retries", value)
    elif name in ("timeout", "request_timeout") and isinstance(value, int | float):
        set_all(done, "deadline", f"{value:g}s")
    elif name == "fallbacks" and isinstance(value, list):
        for each in value:
            for model, others in (each if isinstance(each, dict) else {}).items():
                add_fallbacks(done, f"{where}.fallbacks", str(model), others)
    elif name == "model_group_alias" and isinstance(value, dict):
        for alias, target in value.items():
            add_alias(done, str(alias), target)
    elif name == "routing_strategy" and value in STRATEGIES:
        weighs = any("weight" in row for row in done.upstreams)
        policy = STRATEGIES[value]
        set_all(done, "policy", "round_robin" if policy == "weighted" and not weighs else policy)
    elif name == "cache":
        kind = dict_at(part, "cache_params").get("type", "local")
        if value is True and kind == "local":
            set_all(done, "cache", f"{dict_at(part, 'cache_params').get('ttl', CACHE_S)}s")
            done.miss(f"{where}.cache", "converted; here each key has its own answers, not streams")
        elif value:
            done.miss(f"{where}.cache", f"a cache of type {kind!r} is not there; `cache:` is")
    elif name == "drop_params":
        done.miss(f"{where}.{name}", "a field without a place is refused, or asked elsewhere")
    elif name != "cache_params" and rows:
        done.miss(f"{where}.{name}", "no such setting here")


def set_all(done: Conversion, name: str, value: Any) -> None:
    """Set a field of all model rows."""
    for row in done.models.values():
        row[name] = value


def add_fallbacks(done: Conversion, where: str, model: str, others: Any) -> None:
    names = [str(each) for each in (others if isinstance(others, list) else [others])]
    for name in names:
        if model not in done.models or name not in done.models or name == model:
            done.miss(where, f"{model} → {name}: one of them is no model of this file")
        else:
            done.models[model].setdefault("fallbacks", []).append(name)


def add_alias(done: Conversion, alias: str, target: Any) -> None:
    name = str(target.get("model") if isinstance(target, dict) else target)
    if name in done.models and alias not in done.models:
        done.models[name].setdefault("aliases", []).append(alias)
    else:
        done.miss("router_settings.model_group_alias", f"{alias} → {name}: not another name of one")


def break_loops(done: Conversion) -> None:
    """Take out fallbacks that lead back: here the fallbacks of a fallback are asked as well."""

    def reaches(name: str, goal: str) -> bool:
        seen, open_names = {name}, [name]
        while open_names:
            others = set(done.models[open_names.pop()].get("fallbacks", ())) - seen
            seen |= others
            open_names += others
        return goal in seen

    fallbacks = {name: row.pop("fallbacks", []) for name, row in done.models.items()}
    for model, others in fallbacks.items():
        for name in dict.fromkeys(others):
            if reaches(name, model):
                done.miss("fallbacks", f"{model} → {name} would lead back to {model}: left out")
            else:
                done.models[model].setdefault("fallbacks", []).append(name)
