"""`chatmill view`: browse a dataset in a local web page."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli.options import AsJson, TokenDtype, echo_json, echo_line
from chatmill.cli.show import ItsTokenizer
from chatmill.cli.viewed import PreviewOptions, Viewed, open_data
from chatmill.errors import UsageError
from chatmill.load.config import LoadConfig
from chatmill.plain_file import local_path
from chatmill.show.losses import run_losses
from chatmill.show.order_view import audit_logs
from chatmill.show.viewer import Viewer


def view(
    dataset: Viewed,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to serve on; 0 selects any free port.", show_default="any free port"),
    ] = 0,
    audit: Annotated[
        list[Path] | None, typer.Option(help="Audit log, or a folder of audit logs; may be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Config of a run, to show its episode order and how it packs rows.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A run trained with --log_rows, to sort episodes by their last loss."),
    ] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the input files, to show original records; may be repeated.",
            show_default="the current folder",
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for search indexes. An index is about as large as the text.",
            show_default="chatmill/view in the user's cache",
        ),
    ] = None,
    tokenizer: ItsTokenizer = None,
    *,
    preview: PreviewOptions,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Browse a dataset in the browser: search and filter episodes, and see why each token is trained or not.

    Serves a read-only page on 127.0.0.1, for browsers on this machine only; press Ctrl-C to quit. The first time a
    dataset is viewed, a search index is built in the background and kept in --index. Requires pip install
    'chatmill[view]'. --json prints the address as JSON.

    \b
    Examples:
      chatmill view data/chat_sft
      chatmill view chat.jsonl --tokenizer Qwen3-4B
      chatmill view recipe.yaml
      chatmill view data/chat_sft --run checkpoints/my_sft_model
      chatmill view data/chat_sft --audit logs/audit --config configs/sft1/150M.json --port 8000
    """
    try:
        from chatmill.show.server import serve
    except ImportError as error:
        raise UsageError(f"the viewer needs {error.name}; pip install 'chatmill[view]'") from None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = local_path(index) if index else user_cache / "chatmill" / "view"
    load = None if config is None else LoadConfig.of_run(config)
    sources = None if load is None or load.mix is None else sorted(load.mix)

    def ready(url: str) -> None:
        if as_json:
            echo_json({"url": url, "dataset": str(dataset), "index": str(cache)})
        else:
            echo_line(f"{dataset}: {url}  (press Ctrl-C to quit)")
            echo_line(
                opened.view.preview.note
                if opened.view.preview
                else f"the index for search and filters is kept in {cache}"
            )
        # Flush, because a program that reads the address from a pipe is waiting for it.
        sys.stdout.flush()

    # Without a handler, SIGTERM would end the process before temporary files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open_data(dataset, tokenizer, preview, token_dtype=token_dtype, sources=sources) as opened:
        viewer = Viewer(
            opened.view,
            # The index of a preview is removed with its temporary folder.
            cache=opened.folder or cache,
            config=load,
            logs=audit_logs(audit or []),
            record_folders=[*opened.record_folders, *(local_path(folder) for folder in records or [Path()])],
            losses=None if run is None else run_losses(local_path(run), opened.view),
        )
        serve(viewer, port=port, ready=ready)
