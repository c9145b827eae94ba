"""The native kernels beside this machine's limits, measured in the same run, and beside torch's own operations.

    python -m benchmarks.native [--only attention|linear|sample] [--threads 2] [--json FILE]

Every figure is the fastest of several runs: other programs on the machine make all others slower.
"""

from __future__ import annotations

import importlib
import json

from benchmarks.common import options, report
from benchmarks.native_limits import Ceilings
from cuelight.actors.executor.native.build import load_native
from cuelight.models.cache import cache_directory

PARTS = ("attention", "linear", "sample")
"""Each is a module `native_<part>` with `measure(native, ceilings)`, which gives the rows of tables by their titles."""


def main() -> None:
    arguments = options(__doc__, only="", threads=2)
    import torch

    torch.set_num_threads(arguments.threads)
    native = load_native(cache_directory() / "native")
    native.cue_set_threads(arguments.threads)
    ceilings = Ceilings(arguments.threads)
    tables: dict[str, list[dict[str, object]]] = {}
    for part in [arguments.only] if arguments.only else PARTS:
        for title, rows in importlib.import_module(f"benchmarks.native_{part}").measure(native, ceilings).items():
            print(f"\n## {title}\n")
            report(rows, None, threads=arguments.threads)
            tables[title] = rows
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
