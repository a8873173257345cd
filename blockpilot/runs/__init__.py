"""Collect, train, evaluate: each the story of one command, top to bottom."""
