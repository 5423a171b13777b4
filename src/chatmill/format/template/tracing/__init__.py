"""Render Jinja templates and trace the origin of each output character.

sandbox       the Jinja environment and its limits
trace         the steps and conditions of a rendering, to replay for other conversations; texts with their origin
traced_str    strings that record the origin of their characters
program       compiled templates, plain and traced
"""
