"""What `make bench` runs: every figure that kvcellar claims, measured beside its ceiling."""
