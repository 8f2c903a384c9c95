"""What a trained run is used for: held-out loss and text."""
