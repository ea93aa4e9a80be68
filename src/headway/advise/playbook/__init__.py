"""The order in which a server is made cheaper and faster, walked with its own numbers.

walk    the eight steps over a diagnosis: what is done, what is next, what it would bring
show    the same as a table
page    the same as one page with the flowchart
"""
