"""Several machines: placement of models, and servers that Ray starts, ends and scales."""
