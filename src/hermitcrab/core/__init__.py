"""Sessions, shell state, and the way of a command from text to result."""
