"""The embedded model `nano`: its world of small broken repositories, recipe and evaluation."""
