"""The node's process: connections in, calls into the store, replies out; and its HTTP process."""
