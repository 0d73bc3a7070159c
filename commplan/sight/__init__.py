"""What happened in one backward, measured or predicted: intervals, what was hidden and exposed, and why."""
