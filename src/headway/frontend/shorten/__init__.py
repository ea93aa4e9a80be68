"""Prompt shortening: cut documents and results of tools to a share of their tokens.

units     split a text into units: sentences, items of a list, elements of JSON
choose    choose the units to keep: exact duplicates go first, then the least surprising
scorer    process of the draft model that scores how surprising a unit is
"""
