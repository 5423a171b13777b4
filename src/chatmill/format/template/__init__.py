"""Chat templates of Hugging Face: any conversation they can write, with a mask that is derived and proven.

sandbox, rewrite, program   Jinja as templates expect it, with limits; faults that name a line
pieces, slices, text        strings that know where their characters came from
trace                       what a rendering asked of its texts, so that it can be replayed on others
traced, writer              renderings, plain and traced
origins, prefixes           the answers, found in two ways that share no code
derive, settle, tags        the two held against each other; or the template's own generation tags
layout, printing            from a rendering to Rows
messages, folder, probes    what a template is given, and what comes with it
format                      all of it as a format
certificate                 what a template keeps and what it breaks, in one line each
"""

from chatmill.format.template.renderer import TemplateRenderer, open_template_renderer

__all__ = ["TemplateRenderer", "open_template_renderer"]
