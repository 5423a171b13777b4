"""Render conversations to Rows with Hugging Face chat templates, and compute and check the loss mask.

`renderer` renders conversations; for conversations with the same structure, it replays a cached trace of the template.
`template` compiles a chat template.
`hf_folder` reads the template, special tokens and stop tokens of a model folder.
`certify/` checks whether a template meets the requirements for training, and reports one line per requirement.
`tracing/` runs Jinja in a sandbox and tracks the origin of every output character.
`answers/` determines which characters are trained on, with two methods that share no code.
`layout` divides a rendered conversation into control tokens and pieces of text.
`encode` encodes the rendered text of many records to Rows.
"""
