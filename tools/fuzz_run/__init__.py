"""Random files before the checker: whatever is in them, it answers, in words and in time."""
