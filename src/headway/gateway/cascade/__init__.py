"""Cascades: a cheap route answers first where evidence allows it; else the expensive route does."""
