"""Training: the model, its loss, and what surrounds them. Needs numpy, torch and safetensors, nothing more.

port       what every model offers; called, it gives the losses of a batch
gpt        chatmill's own GPT
hf, lora   any Hugging Face causal model, and adapters on it
attention  a token sees its own conversation alone
loss       the weighted loss of the trained tokens, without the logits of all
generate   answers, greedy or sampled; beams: the best of several
folder     open_model: a model from its folder, whoever's it is

config     all keys of a run; schedule: the learning rate
loop       train: batches in, checkpoints out; command: the same from a shell
opening    data, model and optimizer, new or as a checkpoint left them; start: what must fit
step       one optimizer step on the global batch; world: the ranks that share it
checkpoint whole or not at all; pieces: tensors in rows for any number of ranks
evaluate   the exact loss of a split
output     what a run writes: journal, progress, plot
"""
