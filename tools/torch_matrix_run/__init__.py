"""The tests of the executor under one torch release after another. Needs nothing but Python and pip."""
