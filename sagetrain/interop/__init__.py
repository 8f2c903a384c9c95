"""Import and export of other libraries' models: Hugging Face folders."""
