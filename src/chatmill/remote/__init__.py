"""Objects at URLs: buckets, Hugging Face datasets and web servers, through fsspec.

Nothing here is imported, and fsspec is not needed, unless a user gives a URL.
"""
