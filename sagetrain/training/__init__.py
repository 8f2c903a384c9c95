"""The training of a run: how it is built, its loop, its callbacks and controllers, and the files that it writes."""
