"""What to ask for: lengths of public traces, drawn or fixed, or a user's own file. Prompts are real text.

`lengths` says how many tokens each request has, `corpus` cuts prompts of exactly so many tokens out of a
text that the demo model wrote (scripts/make_corpus.py), `files` reads JSONL and ShareGPT, `tokenizers`
counts, and `load` puts them together.
"""
