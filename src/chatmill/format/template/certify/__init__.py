"""Check chat templates and report the result as a certificate.

`certificate` returns the lines of a certificate, in order.
`finding` defines one line of a certificate: PASS, WARN, FAIL or SKIP.
`observe` renders the conversations that are checked.
`plain_check` compares the text of finished rows with the text of prompts, and shares no code with `answers/`.
`trained_lines` contains the lines about training: ids, answers, and where answers start and end.
`template_lines` contains the lines about rendering: roles, tools, reasoning, and rejected record shapes.
"""
