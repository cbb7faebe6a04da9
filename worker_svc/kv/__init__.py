"""KV blocks: pool, prefix cache, tiers and the contiguous control arm. Pure Python."""
