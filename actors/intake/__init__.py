"""Intake: every request is validated, tokenized and counted here before anyone else hears of it."""
