"""What each family of Llama-like models has of its own."""
