"""What does an optimizer step: DeepSpeed, and what an engine is given and gives back."""
