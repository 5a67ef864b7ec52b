"""Where KV bytes lie on a node: the arena, its slots, and the seal that proves a slot's bytes.

Nothing is re-exported: the server imports `slots`, `arena` and `limits`, which need neither numpy
nor numba, and only those that touch bytes import `seal`.
"""
