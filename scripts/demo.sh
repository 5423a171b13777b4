#!/usr/bin/env bash
# From nothing to a dataset you can look into, with the embedded conversations. Everything is written under demo/.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf demo
mkdir demo

step() { printf '\n== %s\n$ %s\n' "$1" "$2"; eval "$2"; }

step "What is in the data?" "chatmill check data/conversations.jsonl data/tool_conversations.jsonl"
step "Train a small tokenizer on it" \
  "chatmill tokenizer train data/conversations.jsonl data/tool_conversations.jsonl --vocab-size 2000 -o demo/tokenizer.json"
step "How is a conversation with a tool trained on? (* is trained)" \
  "chatmill render data/tool_conversations.jsonl --tokenizer demo/tokenizer.json -n 1"
step "A conversation in another format" \
  "chatmill render data/conversations.jsonl --format post-training -n 1"
step "Make a dataset of it, a tenth kept for validation" \
  "chatmill prepare data/conversations.jsonl data/tool_conversations.jsonl -o demo/dataset --tokenizer demo/tokenizer.json --max-tokens 256 --val-split 0.1"
step "Is every bit of it as it was written?" "chatmill verify demo/dataset --full"

cat <<'NEXT'

demo/dataset is what training reads. What to try next:
  .venv/bin/chatmill render YOUR.jsonl            your own conversations (see docs/records.md)
  .venv/bin/chatmill prepare YOUR.jsonl -o data/v1   a dataset of them (see docs/prepare.md)
  .venv/bin/chatmill formats chatml > mine.toml   a chat format of your own (see docs/formats.md)
  .venv/bin/chatmill --help
NEXT
