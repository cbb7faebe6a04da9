"""Model runners: the only place that imports torch or vLLM."""
