"""What runs before the first step: loading a model, sizing its memory."""
