"""Places for chunks behind the arena: what a tier promises, the file system, the wrappers.

Nothing is re-exported: `base` and `adapters` need neither numpy nor numba, so that the control
process may import them; what moves bytes (`filesystem`, and `registry`, which builds it) is for
the tier process alone.
"""
