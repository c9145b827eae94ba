"""The detokenizer: decodes token ids into text and finds stop strings."""
