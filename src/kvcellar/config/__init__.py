"""What a user may set: the frozen configuration, its flags, and the one place that reads them."""
