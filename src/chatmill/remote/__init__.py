"""Access objects in buckets, in Hugging Face datasets and on web servers through fsspec.

These modules are imported only for URLs, so fsspec is not required for local files.
"""
