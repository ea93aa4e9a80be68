"""The recipe of `headway-first`, the small chat model embedded in Headway.

It is given a folder of public-domain text and half an hour of one CPU core.
It promises an ordinary Hugging Face Llama folder whose weights come from this training alone.
"""
