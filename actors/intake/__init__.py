"""Intake: validates, tokenizes and counts each request before the other actors receive it."""
