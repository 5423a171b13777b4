"""Training on the model's own answers: what it found is kept, what it missed is appended.

vocabulary  a tokenizer as bytes a token
scan        the entries of an answer, where they stand, and where the answer may be cut
schema      what an entry must be, read strictly and written in one way
match       found objects to true ones
target      one row: the kept prefix, what was missed, the end, and which of it is trained
prompt      what an answer follows, the same for generation and training
loss        one number from one forward pass
generate    who answers: a model here, or a server
task        conversations and true objects in, rows out; files of them and of rollouts, and how those do
"""
