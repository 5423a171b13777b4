#!/usr/bin/env bash
# Train a model on conversations and chat with it, in two minutes on two cores. All files are written under demo/.
# Arguments are passed to both training runs: scripts/demo.sh --max_iters 100
set -euo pipefail
# Train two small models at the same time, each on one core.
export OMP_NUM_THREADS=1
cd "$(dirname "$0")/.."
rm -rf demo
mkdir demo
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

step() { printf '\n== %s\n$ %s\n' "$1" "$2"; eval "$2"; }

data="data/desk_chat.jsonl data/desk_tools.jsonl"
held_out="--val-file data/desk_chat_heldout.jsonl --val-file data/desk_tools_heldout.jsonl"
train="--config_file configs/demo.json --dataset_dir demo/dataset --out_dir demo/checkpoints $*"

step "The data: a lost property office. Many careless replies of the clerk have weight 0: they must not be learned" \
  "chatmill check $data"
step "Train a small tokenizer" \
  "chatmill tokenizer train $data --vocab-size 500 --format primer -o demo/tokenizer.json"
step "Build a dataset; the validation split has the questions that the model will be asked" \
  "chatmill prepare $data $held_out -o demo/dataset --tokenizer demo/tokenizer.json --format primer"
step "Show a conversation as training sees it ([trained]); the careless reply is context" "chatmill show demo/dataset 2"
step "Why is this token not trained?" "chatmill explain demo/dataset 2:11"
step "Write a page about the dataset" "chatmill report demo/dataset -o demo/report.html"
step "Train a small GPT with the loss mask, and at the same time one without it: every token is trained" \
  "chatmill train --model_name unmasked $train --use_loss_mask false --audit_dir demo/audit_unmasked > demo/unmasked.log 2>&1 & unmasked=\$!
  chatmill train --model_name masked $train --audit_dir demo/audit"
step "Verify from the audit log which data the model was trained on, in which order" \
  "chatmill audit verify demo/audit/audit_*.log --checkpoint demo/checkpoints/masked"
step "Chat with it" \
  "chatmill chat demo/checkpoints/masked --max-tokens 40 --prompt 'Where are the scarves?' --prompt 'Can I come on Tuesday?'"
step "Ask both models questions that they have not seen" \
  "wait \$unmasked; for name in masked unmasked; do chatmill eval demo/checkpoints/\$name demo/dataset --json > demo/\$name.json; done"

status=0
step "What did the loss mask do? Same data, same steps" \
  "python scripts/demo_table.py demo/masked.json demo/unmasked.json" || status=$?

cat <<'NEXT'

What to try next:
  .venv/bin/chatmill chat demo/checkpoints/unmasked                        the careless model
  .venv/bin/chatmill eval demo/checkpoints/masked demo/dataset --wrong 5   the answers that are wrong
  .venv/bin/chatmill check YOUR.jsonl                                      your own data; see docs/tutorials/quickstart.md
  .venv/bin/chatmill view demo/dataset                                     every conversation with its mask, in a browser
The page about the dataset: demo/report.html
NEXT
exit $status
