"""One captured region: compiled, planned, watched from call to call."""
