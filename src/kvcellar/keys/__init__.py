"""What a chunk is called: identity of KV, the same in every process, host and release."""
