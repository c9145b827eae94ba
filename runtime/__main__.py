"""`python -m cuelight` is the `cuelight` command."""

from __future__ import annotations

import sys

from cuelight.cli.commands import main

sys.exit(main())
