#!/usr/bin/env bash
# From nothing to a model that answers, with the embedded conversations. Everything is written under demo/.
# What follows the script's name is given to both trainings: scripts/demo.sh --max_iters 300
set -euo pipefail
# Two small models, a core for each.
export OMP_NUM_THREADS=1
cd "$(dirname "$0")/.."
rm -rf demo
mkdir demo
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

step() { printf '\n== %s\n$ %s\n' "$1" "$2"; eval "$2"; }

data="data/desk_chat.jsonl data/desk_tools.jsonl"
kept="--val-file data/desk_chat_heldout.jsonl --val-file data/desk_tools_heldout.jsonl"
train="--config_file configs/demo.json --dataset_dir demo/dataset --out_dir demo/checkpoints $*"

step "What is in the data? The desk of a lost property office, with talk, corrections and a tool" \
  "chatmill check $data"
step "Train a small tokenizer on it" \
  "chatmill tokenizer train $data --vocab-size 800 --format primer -o demo/tokenizer.json"
step "Make a dataset of it, and keep for validation what the model is to be asked" \
  "chatmill prepare $data $kept -o demo/dataset --tokenizer demo/tokenizer.json --format primer"
step "Is every bit of it as it was written?" "chatmill verify demo/dataset --full"
step "One of its conversations, as training sees it ([trained])" "chatmill show demo/dataset 601"
step "Why is its last token trained?" "chatmill explain demo/dataset 601:150"
step "All about the dataset on one page" "chatmill report demo/dataset -o demo/report.html"
step "Train a small GPT on the answers, and beside it one with the mask off: every token is trained" \
  "chatmill train --model_name unmasked $train --use_loss_mask false --audit_dir demo/audit_unmasked > demo/unmasked.log 2>&1 & unmasked=\$!
  chatmill train --model_name masked $train --audit_dir demo/audit"
step "Was it trained on what the log says, in that order?" \
  "chatmill audit verify demo/audit/audit_*.log --checkpoint demo/checkpoints/masked"
step "Which conversations cost the most in step 10?" "chatmill rows demo/checkpoints/masked --step 10 -n 3"
step "Talk to it" \
  "chatmill chat demo/checkpoints/masked --max-tokens 60 --prompt 'I lost a white silk umbrella. I live at Castle 12.' --prompt 'It is for Ada Novak.' --prompt 'Please search now.'"
step "Ask both what they have never seen" \
  "wait \$unmasked; for name in masked unmasked; do chatmill eval demo/checkpoints/\$name demo/dataset --json > demo/\$name.json; done"

status=0
step "What did the mask do? Same data, same steps" \
  "python scripts/demo_table.py demo/masked.json demo/unmasked.json" || status=$?

cat <<'NEXT'

What to try next:
  .venv/bin/chatmill chat demo/checkpoints/masked                          talk to it yourself
  .venv/bin/chatmill eval demo/checkpoints/masked demo/dataset --wrong 5   what it gets wrong
  .venv/bin/chatmill view demo/dataset                                     the dataset in a browser
  .venv/bin/chatmill check YOUR.jsonl                                      your own data: docs/tutorials/quickstart.md goes on
The page about the dataset: demo/report.html
NEXT
exit $status
