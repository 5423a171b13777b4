#!/usr/bin/env bash
# From nothing to rows you can look at, with the embedded conversations. Everything is written under demo/.
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
step "Every row as ids and labels" \
  "chatmill render data/conversations.jsonl --tokenizer demo/tokenizer.json --json > demo/rows.jsonl"

cat <<'NEXT'

demo/rows.jsonl holds one row a line: ids, labels, weights and spans. What to try next:
  .venv/bin/chatmill render YOUR.jsonl            your own conversations (see docs/records.md)
  .venv/bin/chatmill formats chatml > mine.toml   a chat format of your own (see docs/formats.md)
  .venv/bin/chatmill --help
NEXT
