"""Guessing tokens before the model computes them.

    lookup      what followed the end of a sequence where it stood in it before
    suffixes    the same in past answers, by cache salt

Nothing here touches a plan: token ids and numbers come in, guesses and counts go out.
"""
