"""Shorter prompts: what of a document or a tool's result goes, and who says what it is worth.

units     a text in units that can go: sentences, items of a list, elements of JSON
choose    which units stay: exact duplicates go first, then the least surprising
scorer    the process of the drafting model that says how surprising a unit is
"""
