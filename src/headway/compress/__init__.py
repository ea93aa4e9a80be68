"""Model surgery: folders of weights turned into other folders of weights."""
