"""The model that computes the tokens: a Llama-style transformer and its weights."""
