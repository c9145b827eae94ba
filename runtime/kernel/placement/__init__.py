"""Actors outside the event loop: `remote` is the parent's side, `wire` the connection; `kernel.child` is the child."""
