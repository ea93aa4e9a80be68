"""Model surgery: folders of weights turned into other folders of weights.

Here live `headway widen` (a small model in a large one's sizes, with the same logits) and `headway
distill` (a student trained on its teacher's distribution). It imports core, runtime and evals, and
torch at will. It serves nothing; what it writes is an
ordinary Hugging Face folder that any engine can load.
"""
