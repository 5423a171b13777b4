"""Render Jinja templates and trace the origin of each output character.

sandbox       the Jinja environment and its limits
trace         the recorded steps of a template and their conditions, to replay for other conversations
traced_str    strings that record the origin of their characters
program       compiled templates, plain and traced
"""
