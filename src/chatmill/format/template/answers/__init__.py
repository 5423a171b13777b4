"""Find the answers in a rendered conversation: the characters that are trained on.

`by_origin` finds answers from the origin of each character: the template, or a field of a message.
`by_prefix` finds answers by rendering the prompt of each answer, and shares no code with `by_origin`.
`contexts` finds the text that must precede each answer: the end of its prompt, starting at the assistant header.
`derive` runs both methods and compares their results, or reads the generation tags of the template.
`guards` adds the conditions under which the answers of one conversation are also valid for another one.
"""
