"""Derive the answers in a rendering: the characters that are trained on.

`by_origin` derives answers from the origin of each character.
`by_prefix` derives answers from the prompts that a server would send, and shares no code with `by_origin`.
`contexts` finds the text that must precede each answer: the end of its prompt, starting at the assistant header.
`derive` runs `by_origin` and `by_prefix`, which must agree, or reads the generation tags of the template.
`guards` adds conditions under which other conversations can reuse the result.
"""
