"""How well a model answers, by whole forwards without any hook."""
