"""Which characters of a rendering are answers, that is trained.

by_origin    from where each character came from
by_prefix    from the prompts that a server would send, as plain text; shares no code with by_origin
derive       both, which must agree; or the generation tags of the template; with the guards for other conversations
"""
