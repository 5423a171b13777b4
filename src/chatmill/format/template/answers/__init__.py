"""Which characters of a rendering are answers, that is trained.

by_origin    from where each character came from
by_prefix    from the prompts that a server would send, as plain text; shares no code with by_origin
contexts     what must precede each answer: the end of its prompt, from the assistant header on
derive       both, which must agree; or the generation tags of the template
guards       what keeps the result valid for other conversations
"""
