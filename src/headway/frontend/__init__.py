"""What the serving process does before and after the engine: text to tokens, steps to answers.

Here live the engine's clients (a process of its own or the same one), streams and answers, and
`text`: tokenizer, chat templates, parsers of tool calls and of reasoning.
It decides nothing about steps and knows no HTTP. It imports core, telemetry and engine;
the engine never imports it.
"""
