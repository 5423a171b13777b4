"""Prepare a tool-calling dataset for supervised fine-tuning.

python scripts/prepare_tool_sft.py --input data/tool_conversations.jsonl --output_dir data/tool_sft --val_split 0.1
"""

from chatmill.cli.prepare import script

if __name__ == "__main__":
    script("tool", __doc__)
