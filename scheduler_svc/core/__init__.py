"""The scheduler as a pure, deterministic state machine: events in, effects out."""
