"""How bytes and descriptors get from one process of a node to another; no messages in here."""
