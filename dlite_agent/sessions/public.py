"""Whose the sessions are that belong to every tenant."""

from __future__ import annotations

__all__ = ["PUBLIC"]

PUBLIC = "<public>"
"""Tenant of the prefixes that were declared public: every tenant's requests fork them. They hold
what was declared and nothing else, since nobody continues them."""
