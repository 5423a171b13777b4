"""See every token, why it is trained, and what the data looks like; all of it read off the stored spans.

text, dataset                 what tokens stand for, made harmless; a dataset with its tokenizer
turns, explain                who speaks in a row; why a token has its weight
terminal, conversation        rows in the terminal, span by span and turn by turn
survey, charts, report        the whole in numbers, and as a page
search, index, index_build    texts in many episodes, and the index that finds them at once
raw, schedule                 the record behind an episode; when an episode comes
viewer, server, page/         what the browser may ask, who answers it, and the page that asks
"""
