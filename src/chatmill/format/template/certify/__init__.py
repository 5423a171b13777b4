"""Certificates of chat templates.

certificate      the lines of a certificate, in their order
finding          one line: PASS, WARN, FAIL or SKIP
observe          the conversations that are rendered for it
plain_check      compares finished rows with prompts, as plain text; shares no code with answers/
trained_lines    lines about what is trained: ids, answers, their starts and ends
template_lines   lines about what the template writes: roles, tools, reasoning, shapes that it refuses
"""
