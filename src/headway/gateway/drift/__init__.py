"""Whether upstreams of one model still say the same: asked the same probes, compared, suspected."""
