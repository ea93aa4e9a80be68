"""Model surgery: folders of weights turned into other folders of weights.

Here lives `headway widen`: a small model in a large one's sizes, with the same logits.
It imports core, runtime and measure, and torch at will. It serves nothing; what it writes is an
ordinary Hugging Face folder that any engine can load.
"""
