"""What chunked prefill spares running requests while long prompts arrive."""
