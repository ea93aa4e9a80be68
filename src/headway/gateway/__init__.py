"""One address in front of many servers: routing, failover, budgets and the ledger of costs.

The gateway relays the OpenAI and Anthropic endpoints to upstreams: Headway, vLLM, llama-server, or
any server with `/v1/chat/completions`. It imports core, telemetry, edge and batches. It has no
engine and no tokenizer, so it compares prompts in bytes.
"""
