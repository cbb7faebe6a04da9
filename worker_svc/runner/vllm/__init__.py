"""vLLM's executor and model runner as a backend, under Octavo's plans and block tables."""
