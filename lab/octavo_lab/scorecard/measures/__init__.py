"""Measures, one module per subject. Import what is heavy inside the functions."""
