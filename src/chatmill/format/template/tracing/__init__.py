"""Traced renderings of Jinja templates.

sandbox             the Jinja environment, its limits, and compiled templates
trace               what a rendering computed and observed, for replay on other conversations
provenance          pieces of text with their origin
traced_str          strings made of such pieces
traced_template     templates that write such strings
"""
