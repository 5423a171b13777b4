"""Render conversations to Rows with Hugging Face chat templates, and derive and check the loss mask.

`renderer` derives the answers of a conversation, or replays a cached trace.
`template` compiles a chat template.
`hf_folder` reads the template, special tokens and stop tokens of a model folder.
`certify/` checks a template and reports one line for each requirement of training.
`tracing/` runs Jinja in a sandbox and tracks the origin of every output character.
`answers/` derives which characters are trained on, with two methods that share no code.
`layout` divides a rendering into control tokens and runs of text.
`encode` encodes the texts of many records and builds Rows.
"""
