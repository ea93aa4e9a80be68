"""Work of the serving process before and after the engine: text to tokens, steps to answers.

This room has the clients of engines (in a process of their own, or in this one), the streams of
answers, and `text`: tokenizer, chat templates, parsers of tool calls and of reasoning. It makes no
decision about steps and knows no HTTP. The engine never imports it.
"""
