"""Live requests: their choices, what their clients are sent, their accounts."""
