"""Watches of a stage that look at a model while it trains."""
