"""A plan as JSON and back."""
