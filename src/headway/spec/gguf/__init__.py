"""GGUF, the one-file format of llama.cpp, as far as it can be read without torch.

`header` reads what a file says of itself, `config` and `tokenizer` say it in the words of a Hugging
Face folder (config.json, tokenizer.json, …), `names` says which tensor is which weight.
"""
