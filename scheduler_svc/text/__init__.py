"""Tokenizing, detokenizing, chat templates, stop strings, trimming."""
