"""Objects at URLs: buckets, Hugging Face datasets and web servers, through fsspec.

Modules are imported only if a user gives a URL; otherwise fsspec is not required.
"""
