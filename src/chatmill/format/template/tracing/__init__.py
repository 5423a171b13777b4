"""Traced renderings of Jinja templates.

sandbox       the Jinja environment and its limits
trace         what a rendering computed and observed, for replay on other conversations; texts with their origin
traced_str    strings that record the origin of their characters
program       compiled templates, plain and traced
"""
