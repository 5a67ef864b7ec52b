"""Shipped for people who extend kvcellar: the test-suite that every tier passes, and fakes."""
