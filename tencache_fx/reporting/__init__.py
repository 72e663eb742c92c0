"""Values in, text and pictures out."""
