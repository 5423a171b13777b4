"""Conversations in, exact training batches out."""
