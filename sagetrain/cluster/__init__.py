"""The processes of a run: how they meet, check one another, share a folder, are watched and end."""
