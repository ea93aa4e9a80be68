"""Skills with checkable answers: seeded generators of chats at three levels of difficulty.

It is given a skill, a level and a seed, and yields examples that any chat model can be asked.
It promises that an example is for training or for testing, never both, decided by its text.
"""
