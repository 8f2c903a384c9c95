"""Other libraries' models: Hugging Face folders, out and in."""
