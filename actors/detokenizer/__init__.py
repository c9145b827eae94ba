"""The detokenizer: token ids become text, and a stop string ends it."""
