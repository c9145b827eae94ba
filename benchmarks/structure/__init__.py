"""Readability of a checkout in figures: sizes, imports, names and prose. Reads files without importing them."""
