"""Hugging Face chat templates: conversations to Rows, with a mask that is derived and checked.

renderer     TemplateRenderer: derives the answers of a conversation, or replays a cached trace
template     a template, and records as its variables
hf_folder    the template, special tokens and stop tokens of a model folder
certify/     what a template keeps of what training relies on, one line each
tracing/     Jinja in a sandbox, with the origin of every character it writes
answers/     which characters are trained, derived in two ways that share no code
layout       a rendering divided into cells for encoding
encode       the cells of many records at once to Rows
"""
