"""Check chat templates and report the result as a certificate.

certificate      the lines of a certificate, in order
finding          one line of a certificate: PASS, WARN, FAIL or SKIP
observe          renders the conversations that are checked
plain_check      compares finished rows with prompts, as plain text; shares no code with answers/
trained_lines    lines about training: ids, answers, and where answers start and end
template_lines   lines about rendering: roles, tools, reasoning, rejected record shapes
"""
