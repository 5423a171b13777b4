"""Measure how closely a mix of sources follows the requested mixing weights.

    python benchmarks/mix.py [--rows N] [--json]

The weights are 0.10, 0.70 and 0.20. The fraction of rows from each source is checked after every row. The fraction of
trained tokens from each source is checked at the end, with sources whose average row sizes differ by a factor of six.
This benchmark does not measure time.
"""

from __future__ import annotations

import argparse
from fractions import Fraction

import numpy as np
from measure import machine, report, versions

from chatmill.load.mix import MIX_SFT, MixedOrder, MixSchedule, row_weights, shares
from chatmill.load.order import make_order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows, trained = farthest(args.rows), trained_error(args.rows)
    report(
        f"mixing {args.rows:,} rows; {machine('chatmill')}",
        [
            ("largest deviation from a source's expected number of rows (target 1)", f"{rows:.2f}"),
            ("largest deviation from a source's share of trained tokens (target 0.5%)", f"{100 * trained:.3f}%"),
        ],
        {"rows": args.rows, "farthest_rows": rows, "trained_error": trained, "versions": versions("chatmill")},
        as_json=args.json,
    )


def farthest(rows: int) -> float:
    """Return the largest difference between the actual and the expected number of rows from a source, after any number
    of rows.
    """
    weights = list(row_weights(shares(MIX_SFT)).values())
    sources, _ = MixSchedule(weights).at(np.arange(rows))
    had = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0) * sum(weights)
    due = np.arange(1, rows + 1)[:, None] * np.array(weights)
    return float(np.abs(had - due).max() / sum(weights))


def trained_error(rows: int) -> float:
    """Return the largest difference between the actual and the requested fraction of trained tokens from a source."""
    draw = np.random.default_rng(7)
    sizes = {
        name: draw.lognormal(np.log(mean), 1.0, count).astype(np.int64) + 1
        for name, mean, count in [("primer", 40, 900), ("oasst1", 240, 50_000), ("dolly15k", 90, 15_000)]
    }
    requested = shares(MIX_SFT)
    weights = row_weights(requested, row_size={n: Fraction(int(s.sum()), len(s)) for n, s in sizes.items()})
    mixed = MixedOrder({name: make_order("epoch", len(s), seed=1337) for name, s in sizes.items()}, weights)
    episodes = mixed.block(0, 0, rows)
    trained, source = np.concatenate(list(sizes.values()))[episodes], mixed.source_of(episodes)
    return max(
        abs(float(trained[source == number].sum() / trained.sum()) - float(share))
        for number, share in enumerate(requested.values())
    )


if __name__ == "__main__":
    main()
