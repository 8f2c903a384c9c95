"""The processes of a run: how they meet, check each other, share a run folder, are watched, and end."""
