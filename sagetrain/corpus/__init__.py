"""The room of `sagetrain prepare`: from text to token files and tokenizers. No run imports it."""
