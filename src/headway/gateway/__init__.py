"""One address before many servers: which of them answers, what it costs, and what if one fails.

Given a configuration it relays the OpenAI and Anthropic endpoints to upstreams: Headway, vLLM,
llama-server, or whatever speaks `/v1/chat/completions`. It imports core, telemetry, edge and
batches; it knows no engine and no tokenizer: prompts are compared in bytes.
"""
