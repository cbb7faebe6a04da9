"""Admission: API keys, the load, and what makes a request of the core out of a message."""
