"""`chatmill view`: a dataset in the browser, served by this machine to itself."""

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
        int, typer.Option(min=0, max=65535, help="The port; 0 is any that is free.", show_default="any that is free")
    ] = 0,
    audit: Annotated[
        list[Path] | None, typer.Option(help="An audit log, or a folder of them; may be given several times.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The config of a run, for the order of its epochs and its packing.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A run trained with --log_rows, to sort episodes by their last loss."),
    ] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="A folder that the input's file names start from.", show_default="this one"),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where indexes are kept, about as large as the text.",
            show_default="chatmill/view in the user's cache",
        ),
    ] = None,
    tokenizer: ItsTokenizer = None,
    *,
    preview: PreviewOptions,
    token_dtype: TokenDtype = None,
    as_json: AsJson = False,
) -> None:
    """Browse a dataset: search and filter episodes, see each token and why it is trained, the record, the order.

    The page is served on 127.0.0.1 to browsers on this machine alone, and changes nothing. When a dataset is viewed for
    the first time an index is made beside it in the background; the page says how far it is. Needs
    pip install 'chatmill[view]'. Ctrl-C ends it. With --json the address is printed as JSON.

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
        raise UsageError(f"the viewer needs {error.name}: pip install 'chatmill[view]'") from None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = local_path(index) if index else user_cache / "chatmill" / "view"
    load = None if config is None else LoadConfig.of_run(config)
    sources = None if load is None or load.mix is None else sorted(load.mix)

    def ready(url: str) -> None:
        if as_json:
            echo_json({"url": url, "dataset": str(dataset), "index": str(cache)})
        else:
            echo_line(f"{dataset}: {url}  (Ctrl-C ends it)")
            echo_line(
                opened.view.preview.note
                if opened.view.preview
                else f"the index for search and filters is kept in {cache}"
            )
        # The reader of a pipe waits for it.
        sys.stdout.flush()

    # Without a handler, SIGTERM would end the process before temporary files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open_data(dataset, tokenizer, preview, token_dtype=token_dtype, sources=sources) as opened:
        viewer = Viewer(
            opened.view,
            # The index of a preview is of no use afterwards.
            cache=opened.folder or cache,
            config=load,
            logs=audit_logs(audit or []),
            record_folders=[*opened.record_folders, *(local_path(folder) for folder in records or [Path()])],
            losses=None if run is None else run_losses(local_path(run), opened.view),
        )
        serve(viewer, port=port, ready=ready)
