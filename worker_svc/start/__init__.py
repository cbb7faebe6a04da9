"""What runs before the first step: finding and loading a model, sizing its memory."""
