"""See every token, and why it is trained."""
