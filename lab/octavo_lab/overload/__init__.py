"""A service driven past its capacity and back."""
