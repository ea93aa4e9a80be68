"""Fields that an endpoint refuses by name, and their neutral values.

A field that would change the answer is honoured or refused, never dropped. An endpoint refuses the
fields that other endpoints of this server honour, and those of other servers (`FOREIGN_FIELDS`). A
neutral value passes: null, false, empty, or a default. Fields that change no answer, such as
`cache_prompt` and `keep_alive`, are ignored, and named in a header.
"""

from typing import Any

from headway.core.errors import RequestError

OPENAI = "functions function_call modalities audio web_search_options moderation"
VLLM = (
    "use_beam_search length_penalty bad_words watermarking spaces_between_special_tokens "
    "logprob_token_ids thinking_token_budget repetition_detection chat_template media_io_kwargs "
    "mm_processor_kwargs prompt_embeds kv_transfer_params ec_transfer_params vllm_xargs "
    "return_prompt_text return_token_offsets routed_experts_prompt_start guided_whitespace_pattern "
    "guided_json_object guided_decoding"
)
LLAMA_CPP = (
    "top_n_sigma xtc_probability typical_p dynatemp_range repeat_last_n dry_multiplier mirostat "
    "adaptive_target n_keep n_discard n_indent n_probs n_cmpl min_keep t_max_predict_ms "
    "response_fields post_sampling_probs lora samplers grammar_lazy grammar_triggers return_tokens "
    "return_progress timings_per_token chat_parser thinking_forced_open reasoning_format "
    "reasoning_budget_tokens thinking_budget_tokens"
)
SGLANG = (
    "stop_regex no_stop_trim lora_path session_params separate_reasoning stream_reasoning "
    "return_hidden_states return_routed_experts return_cached_tokens_details return_meta_info "
    "return_prompt_token_ids custom_logit_processor custom_params input_ids task"
)
OLLAMA = "options think raw template images tfs_z top_a"
FOREIGN_FIELDS = frozenset(" ".join((OPENAI, VLLM, LLAMA_CPP, SGLANG, OLLAMA)).split())
"""Fields of other servers that change the answer and that no endpoint here honours."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "n_cmpl", "best_of"), (1,)),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z", "repeat_penalty"), (1,)),
    **dict.fromkeys(("top_n_sigma", "adaptive_target", "repeat_last_n"), (-1,)),
    **dict.fromkeys(("thinking_token_budget", "reasoning_budget_tokens"), (-1,)),
    **dict.fromkeys(("thinking_budget_tokens", "n_predict"), (-1,)),
    **dict.fromkeys(("n_keep", "t_max_predict_ms"), (0, -1)),
    **dict.fromkeys(("xtc_probability", "dynatemp_range", "dry_multiplier", "mirostat"), (0,)),
    **dict.fromkeys(("n_discard", "n_indent", "n_probs", "min_keep", "top_a"), (0,)),
    **dict.fromkeys(("routed_experts_prompt_start", "top_logprobs"), (0,)),
    **dict.fromkeys(("spaces_between_special_tokens", "include_reasoning"), (True,)),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), (True,)),
    **dict.fromkeys(("add_generation_prompt", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "reasoning_format": ("auto", "deepseek"),
}
"""Field → values that change nothing."""
HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "reasoning": "use reasoning_effort or chat_template_kwargs",
    "thinking": "use chat_template_kwargs",
    "think": "use chat_template_kwargs",
    "options": "give its fields beside the messages",
    "chat_template": "a template is the model's, or the operator's (--chat-template)",
    "stop_sequences": "use stop",
    "stop": "use stop_sequences",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens or max_tokens",
    "max_output_tokens": "use max_tokens",
    "n_predict": "use max_output_tokens or max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "response_format": "use text.format, output_config.format or structured_outputs",
    "output_format": "use response_format",
    "guided_decoding": "use structured_outputs",
    **dict.fromkeys(("guided_json", "guided_json_object", "json_schema"), "use structured_outputs"),
    **dict.fromkeys(("guided_regex", "guided_choice", "regex"), "use structured_outputs"),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf", "format"), "use structured_outputs"),
}
"""Field → what to send instead."""


def is_neutral(name: str, value: Any) -> bool:
    """Whether a refused field has a value that changes nothing: `echo: false`, `n: 1`."""
    if value is None or value is False or value in ("", [], {}):
        return True
    same = (default for default in NEUTRAL_VALUES.get(name, ()) if value == default)
    return any(isinstance(value, bool) == isinstance(default, bool) for default in same)


def refuse_fields(raw: dict[str, Any], names: frozenset[str]) -> None:
    """Raise RequestError for the first field among `names` whose value is not neutral."""
    for name, value in raw.items():
        if name in names and not is_neutral(name, value):
            hint = HINTS.get(name)
            raise RequestError(
                f"The field {name} is not supported here{f'; {hint}' if hint else ''}.",
                param=name,
                code="unsupported_parameter",
            )
