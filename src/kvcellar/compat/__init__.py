"""LMCache's names on top of kvcellar; nothing below imports this package."""
