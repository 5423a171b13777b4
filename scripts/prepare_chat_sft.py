"""Prepare a chat dataset for supervised fine-tuning.

python scripts/prepare_chat_sft.py --input data/conversations.jsonl --output_dir data/chat_sft --val_split 0.1
"""

from chatmill.cli.prepare import script

if __name__ == "__main__":
    script("messages", __doc__)
