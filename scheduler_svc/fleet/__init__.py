"""Links to workers, the models they serve, pinned prefixes."""
