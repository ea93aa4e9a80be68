"""The recipe of `headway-tiny` and `headway-draft`, the models embedded in Headway.

It is given a folder of public-domain text and an hour or two of two CPU cores, or a GPU.
It promises ordinary Hugging Face Llama folders whose weights come from this training alone.
"""
