"""Skills with checkable answers: seeded generators of chats at three levels of difficulty.

A skill, a level and a seed give a stream of examples that any chat model can answer. Whether an
example is for training or for testing depends on its text alone, so it is never both.
"""
