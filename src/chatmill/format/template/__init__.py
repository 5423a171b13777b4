"""Render conversations to Rows with Hugging Face chat templates, and derive and check the loss mask.

`renderer` renders a conversation and locates its answers, or replays a cached trace.
`template` compiles a chat template.
`hf_folder` reads the template, special tokens and stop tokens of a model folder.
`certify/` checks whether a template meets the requirements for training, and reports one line per requirement.
`tracing/` runs Jinja in a sandbox and tracks the origin of every output character.
`answers/` derives which characters are trained on, with two methods that share no code.
`layout` divides a rendering into control tokens and runs of text.
`encode` encodes the texts of many records and builds Rows.
"""
