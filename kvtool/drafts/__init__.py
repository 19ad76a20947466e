"""Guesses of what a model will write, which it confirms several at a time."""
