"""Relight keeps a training run alive."""
