"""Several machines: which model runs where. It decides; it starts nothing."""
