"""Who a chunk is kept for, and who gives way when a place is full: pure, for memory and disk."""
