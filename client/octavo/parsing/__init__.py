"""What a model's text means: thoughts, words and calls of tools. Pure: text in, records out."""
